"""Keys of vLLM's own requests: equal tokens are not enough to share a block."""

from itertools import combinations
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvstrata.core.types import BlockKey
from kvstrata.integration.vllm.blocks import BlockMath, GroupMath

TOKENS, HIDDEN = 300, 8
MATH = BlockMath((GroupMath(32),), hash_tokens=32, tokens=64)
BLOCKS = TOKENS // MATH.tokens


def keys(generated: int = 0, **carries: Any) -> list[BlockKey]:
    """Of a request with the same token ids as any other."""
    init_none_hash(sha256)
    ids = None if "prompt_embeds" in carries else [0] * TOKENS
    hasher = get_request_block_hasher(MATH.hash_tokens, sha256)
    request = Request(
        "r", ids, SamplingParams(max_tokens=999), None, block_hasher=hasher, **carries
    )
    request.append_output_token_ids([0] * generated)
    return MATH.keys(request, 0, MATH.known_blocks(request))


def adapter(name: str, path: str) -> LoRARequest:
    return LoRARequest(name, 1, path)


def image(content: str, *, first_token: int = 100) -> list[MultiModalFeatureSpec]:
    place = PlaceholderRange(offset=first_token, length=64)
    return [MultiModalFeatureSpec(None, "image", content, place, mm_hash=content)]


def embeddings(seed: int, rows: int = TOKENS) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def test_requests_that_carry_anything_different_share_no_block() -> None:
    variants: dict[str, dict[str, Any]] = {
        "tokens": {},
        "an adapter": {"lora_request": adapter("one", "/one")},
        "its name, another path": {"lora_request": adapter("one", "/two")},
        "another name": {"lora_request": adapter("two", "/one")},
        "a salt": {"cache_salt": "mine"},
        "another salt": {"cache_salt": "theirs"},
        "salt and adapter": {"cache_salt": "mine", "lora_request": adapter("one", "/one")},
        "embeddings": {"prompt_embeds": embeddings(1)},
        "other embeddings": {"prompt_embeds": embeddings(2)},
        "salted embeddings": {"prompt_embeds": embeddings(1), "cache_salt": "mine"},
    }
    found = {name: keys(**carries) for name, carries in variants.items()}
    assert {len(each) for each in found.values()} == {BLOCKS}
    for one, other in combinations(found, 2):
        assert not {*found[one]} & {*found[other]}, (one, other)
    assert found == {name: keys(**carries) for name, carries in variants.items()}


def test_images_part_at_the_block_where_they_begin() -> None:
    one, other, later = keys(), keys(mm_features=image("a")), keys(mm_features=image("b"))
    moved = keys(mm_features=image("a", first_token=101))
    for left, right in combinations((one, other, later, moved), 2):
        assert left[:1] == right[:1]  # tokens 0 to 63; the image begins at 100
        assert not {*left[1:]} & {*right[1:]}


def test_what_follows_embeddings_is_known_by_them() -> None:
    """Embeddings that are the same up to token 128, and the zeros generated after them."""
    one, other = embeddings(1), embeddings(1)
    other[128:] = embeddings(2)[128:]
    left, right = (keys(200, prompt_embeds=each) for each in (one, other))
    assert len(left) == len(right) == (TOKENS + 200) // MATH.tokens
    assert left[:2] == right[:2]
    assert not {*left[2:]} & {*right[2:]}
    longer = keys(prompt_embeds=torch.cat([one, torch.zeros(200, HIDDEN)]))
    assert left[:4] == longer[:4]
    assert not {*left[4:]} & {*longer[4:]}
