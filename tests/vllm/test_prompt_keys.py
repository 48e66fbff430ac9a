"""Keys made from tokens alone are those that vLLM and the connector make."""

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.blocks import BlockMath, GroupMath
from kvstrata.integration.vllm.fingerprint import hash_seed
from kvstrata.integration.vllm.prompt_keys import PromptKeys


def parts(algorithm: str, seed: str | None = None) -> dict[str, str]:
    return {
        "hash_algorithm": algorithm,
        "hash_seed": seed or hash_seed(algorithm)[0],
        "tokens_per_block": "64",
        "device_block_tokens": "32",
    }


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("tokens", [0, 63, 64, 200, 640])
def test_keys_are_those_of_a_request(algorithm: str, tokens: int) -> None:
    hash_fn = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_fn)
    ids = [(7 * i) % 1000 for i in range(tokens)]
    request = Request(
        "r",
        ids or [1],
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(32, hash_fn),
    )
    math = BlockMath((GroupMath(32),), 32, 64)
    expected = math.keys(request, 0, math.known_blocks(request))
    assert PromptKeys(parts(algorithm)).of(ids) == expected
    assert len(expected) == tokens // 64


def test_another_seed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = hash_seed("sha256")[0]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with pytest.raises(ConfigError, match="another seed") as e:
        PromptKeys(parts("sha256", theirs))
    assert e.value.hint is not None
    assert "PYTHONHASHSEED" in e.value.hint


def test_a_namespace_that_says_nothing_is_named() -> None:
    with pytest.raises(ConfigError, match="does not say its hash_algorithm, hash_seed"):
        PromptKeys({"tokens_per_block": "64"})
