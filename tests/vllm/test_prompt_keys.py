"""Keys made from tokens alone are those that vLLM and the connector make."""

import json
from pathlib import Path

import pytest
from tests.cli.processes import kvstrata
from tests.cli.traffic import engine, serving
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvstrata.cli.prompt_file import read_prompts
from kvstrata.core.errors import ConfigError
from kvstrata.core.types import BlockKey
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


def keys_of_vllm(algorithm: str, ids: list[int]) -> list[BlockKey]:
    hash_fn = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_fn)
    request = Request(
        "r",
        ids or [1],
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(32, hash_fn),
    )
    math = BlockMath((GroupMath(32),), 32, 64)
    return math.keys(request, 0, math.known_blocks(request))


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("tokens", [0, 63, 64, 200, 640])
def test_keys_are_those_of_a_request(algorithm: str, tokens: int) -> None:
    ids = [(7 * i) % 1000 for i in range(tokens)]
    expected = keys_of_vllm(algorithm, ids)
    assert PromptKeys(parts(algorithm)).of(ids) == expected
    assert len(expected) == tokens // 64


def test_warm_brings_the_prompts_of_a_file_up_from_disk(tmp_path: Path) -> None:
    """200 tokens that an engine has saved are 3 blocks; of 70 others the one block is unknown."""
    saved, unknown = [(7 * i) % 1000 for i in range(200)], [1] * 70
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{saved}\n\n{unknown}\n")
    namespace = b"m" * 16
    tiers = ("--host-size", "4MiB", "--disk", f"{tmp_path}/d:64MiB")
    with serving(tmp_path, *tiers) as path, engine(path) as client:
        client.register_namespace(namespace, parts("sha256"))
        task = client.put_match(namespace, keys_of_vllm("sha256", saved))
        client.launch([task.task_id])
        client.complete([task.task_id])
        at = ("--socket", str(path))
        kvstrata("drain", *at)  # all is on disk
        kvstrata("clear", "--tier", "host", *at)
        warmed = kvstrata("warm", str(file), "--namespace", namespace.hex(), *at)
        found = client.get_match(namespace, keys_of_vllm("sha256", saved))
    assert warmed.stdout == (
        f"{file}:1: 3 of 3 blocks are in host memory\n{file}:3: 0 of 1 blocks are in host memory\n"
    )
    assert warmed.returncode == 1  # one is nowhere
    assert (found.matched_blocks, found.disk_blocks) == (3, 0)


def test_texts_are_read_by_the_tokenizer_and_lines_end_where_json_lines_do(tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(100)} | {"two\u2028lines": 100}
    model = Tokenizer(WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = Split(" ", "removed")
    PreTrainedTokenizerFast(tokenizer_object=model, unk_token="w0").save_pretrained(tmp_path)
    text = json.dumps("two\u2028lines " + " ".join(f"w{i}" for i in range(99)), ensure_ascii=False)
    content = f"{text}\r\n\n[1, 2]\n".encode()
    read = read_prompts(content, "x", parts("sha256"), str(tmp_path))
    assert [prompt.name for prompt in read] == ["x:1", "x:3"]
    assert [prompt.keys for prompt in read] == [keys_of_vllm("sha256", [100, *range(99)]), []]
    with pytest.raises(ConfigError, match="cannot be loaded"):
        read_prompts(content, "x", parts("sha256"), str(tmp_path / "nowhere"))


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
