"""What a request says of blending, and what becomes of the names of its blocks."""

import logging
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvstrata.core.load import load_config
from kvstrata.integration.vllm.blend import wishes
from kvstrata.integration.vllm.blend.wishes import can_be_reused, wish_of
from kvstrata.integration.vllm.blocks import BlockMath, GroupMath
from kvstrata.integration.vllm.taint import TaintChain
from kvstrata.observe.seldom import SeldomWarning

TOKENS, HASH_TOKENS = 300, 32
MATH = BlockMath((GroupMath(HASH_TOKENS),), HASH_TOKENS, 2 * HASH_TOKENS)


def request(
    name: str = "r", *, blend: object = None, tokens: int = TOKENS, **carries: Any
) -> Request:
    init_none_hash(sha256)
    params = carries.pop("sampling_params", SamplingParams(max_tokens=99))
    if blend is not None:
        params.extra_args = {"kv_transfer_params": {"blend": blend}}
    hasher = get_request_block_hasher(HASH_TOKENS, sha256)
    return Request(name, [0] * tokens, params, None, block_hasher=hasher, **carries)


def image() -> list[MultiModalFeatureSpec]:
    place = PlaceholderRange(offset=100, length=64)
    return [MultiModalFeatureSpec(None, "image", "x", place, mm_hash="x")]


def test_who_does_not_ask_is_not_blended_unless_all_are() -> None:
    asked, all_are = load_config({}, environ={}), load_config({"blend": "all"}, environ={})
    assert wish_of(request(), asked).refused == "not_asked"
    assert wish_of(request(blend=False), all_are).refused == "not_asked"
    assert wish_of(request(), all_are) == (0.15, None)
    assert wish_of(request(blend=True), asked) == (0.15, None)
    assert wish_of(request(blend={"ratio": 0.3}), asked) == (0.3, None)
    assert wish_of(request(blend={}), asked) == (0.15, None)


@pytest.mark.parametrize(("name", "ratio"), [("fast", 0.05), ("balanced", 0.15), ("safe", 0.3)])
def test_a_request_may_name_its_share_as_the_setting_does(name: str, ratio: float) -> None:
    assert load_config({"recompute_ratio": name}, environ={}).recompute_ratio == ratio
    assert wish_of(request(blend={"ratio": name}), load_config({}, environ={})) == (ratio, None)


@pytest.mark.parametrize(
    "said",
    [
        {"ratio": 2},
        {"ratio": "0.1"},
        {"ratio": ["fast"]},
        {"ratio": True},
        {"share": 0.1},
        "yes",
        1,
        [0.1],
    ],
)
def test_what_is_not_understood_is_said(said: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert wish_of(request("mine", blend=said), load_config({})).refused == "not_understood"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        f"request mine is not blended: kv_transfer_params.blend is {said!r}; give"
    )


def test_a_mistyped_wish_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wishes, "_warn_of_key", SeldomWarning(logging.getLogger("kvstrata")))
    wants = request("mine")
    wants.kv_transfer_params = {"blned": True, "remote_block_ids": []}
    assert wish_of(wants, load_config({}, environ={})).refused == "not_understood"
    (record,) = caplog.records
    assert record.getMessage() == (
        "a request is not blended: kv_transfer_params has 'blned' and no 'blend'"
    )
    wants.kv_transfer_params = {"do_remote_prefill": True, "taint_from": 3}
    assert wish_of(wants, load_config({}, environ={})).refused == "not_asked"
    wants.kv_transfer_params = {"blend": None}
    assert wish_of(wants, load_config({"blend": "all"}, environ={})).blend


@pytest.mark.parametrize(
    ("settings", "ratio", "said"),
    [
        (
            {"blend_rule": "boundary", "recompute_boundary": 3},
            0.3,
            "computes 3 tokens at both ends",
        ),
        ({"blend_rule": "full"}, 0.3, "blend_rule is full, which always computes all; take"),
        ({"blend_rule": "boundary"}, 0, None),
        ({"blend_rule": "full"}, 1, None),
        ({"blend_rule": "hkvd"}, 0.3, None),
    ],
)
def test_a_ratio_that_the_rule_does_not_follow_is_said_now_and_then_and_blended(
    settings: dict[str, Any],
    ratio: float,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(wishes, "_warn_of_ratio", SeldomWarning(wishes._log))
    config = load_config(settings, environ={})
    for blend in ({}, {"ratio": ratio}, {"ratio": ratio}):
        assert wish_of(request("mine", blend=blend), config).blend
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (said is not None)
    if said is not None:
        assert f"a request asks for a ratio of {ratio:g}, which changes nothing" in told[0]
        assert said in told[0]
        assert "two_round_query, query, hkvd or random" in told[0]


@pytest.mark.parametrize(
    ("carries", "reason"),
    [
        ({"lora_request": LoRARequest("a", 1, "/nowhere")}, "adapter"),
        ({"mm_features": image()}, "images"),
        ({"prompt_embeds": torch.zeros(TOKENS, 8)}, "embeddings"),
        ({"sampling_params": SamplingParams(prompt_logprobs=1)}, "prompt_logprobs"),
    ],
)
def test_kinds_of_requests_that_are_not_blended(carries: dict[str, Any], reason: str) -> None:
    asks = request(blend=True, **carries)
    assert wish_of(asks, load_config({})).refused == reason
    assert not can_be_reused(asks)
    assert can_be_reused(request())


def test_tenants_can_be_blended_by_their_salt() -> None:
    config = load_config({"blend_salts": ["a", "b"]}, environ={})
    assert wish_of(request(cache_salt="b"), config) == (0.15, None)
    assert wish_of(request(cache_salt="c"), config).refused == "not_asked"
    assert wish_of(request(), config).refused == "not_asked"
    assert wish_of(request(cache_salt="b", blend=False), config).refused == "not_asked"


def test_taint_renames_the_blocks_from_one_on_also_those_that_come_later() -> None:
    chain, mine, other = TaintChain(MATH), request("mine"), request("other")
    exact = list(mine.block_hashes)
    chain.taint(mine, 5 * HASH_TOKENS + 3)
    chain.taint(other, 5 * HASH_TOKENS)
    for each in (mine, other):
        each.append_output_token_ids([1] * 64)
    names = [mine.block_hashes, other.block_hashes]
    assert [len(each) for each in names] == [11, 11]
    assert names[0][:5] == names[1][:5] == exact[:5]
    assert not {*names[0][5:]} & {*names[1][5:]}
    assert not {*names[0][5:]} & {*exact}
    assert {len(name) for name in names[0]} == {32}
    assert chain.first_token("mine") == 5 * HASH_TOKENS
    assert chain.first_token("nobody") is None


def test_vllms_own_events_of_a_tainted_block_have_its_tokens_and_a_hash_of_no_prompt() -> None:
    chain, mine, exact = TaintChain(MATH), request("mine"), request("exact")
    chain.taint(mine, 5 * HASH_TOKENS)
    stored = []
    for each in (exact, mine):
        pool = BlockPool(10, True, HASH_TOKENS, enable_kv_cache_events=True)
        pool.cache_full_blocks(each, pool.get_new_blocks(9), 0, 9, HASH_TOKENS, 0)
        stored += pool.take_events()
    one, other = stored
    assert one.token_ids == other.token_ids
    assert one.block_hashes[:5] == other.block_hashes[:5]
    assert not {*one.block_hashes[5:]} & {*other.block_hashes[5:]}


def test_taint_that_is_lifted_leaves_the_names_of_the_tokens() -> None:
    chain, mine, plain = TaintChain(MATH), request("mine"), request("plain")
    chain.taint(mine, 64)
    chain.taint(mine, 32)  # planned anew
    for each in (mine, plain):
        each.append_output_token_ids([1] * 64)
    chain.lift(mine)
    assert mine.block_hashes == plain.block_hashes
    assert chain.first_token("mine") is None
    chain.lift(mine)
    assert mine.block_hashes == plain.block_hashes


def test_taint_of_a_request_without_a_whole_block_can_be_lifted() -> None:
    chain = TaintChain(MATH)
    mine, plain = (request(name, tokens=31, cache_salt="s") for name in ("mine", "plain"))
    chain.taint(mine, 3)
    for each in (mine, plain):
        each.append_output_token_ids([1] * 64)
    assert not {*mine.block_hashes} & {*plain.block_hashes}
    assert chain.first_token("mine") == 0
    chain.lift(mine)
    assert mine.block_hashes == plain.block_hashes
    assert mine.cache_salt == "s"
