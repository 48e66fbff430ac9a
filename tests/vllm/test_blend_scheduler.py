"""What the blending scheduler half offers vLLM, with a real server and no engine."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.caches import PATIENCE_SECONDS, eventually
from tests.vllm.bench import Bench, prompt, start
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import TOKENS
from tests.vllm.faults import Copies
from tests.vllm.plans import chunked, full, group, mla, plan, sliding, vllm_config
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec, MambaSpec
from vllm.v1.request import Request

from kvstrata.blend.audit import Audit
from kvstrata.blend.runs import Runs
from kvstrata.core.errors import ConfigError
from kvstrata.core.keys import as_key_array
from kvstrata.core.load import load_config
from kvstrata.integration.vllm.blend.connector import BlendConnector
from kvstrata.integration.vllm.blend.learning import Learning
from kvstrata.integration.vllm.blend.lookups import RunLookup
from kvstrata.integration.vllm.blend.scheduler import BlendScheduler
from kvstrata.integration.vllm.blend.supported import refuse_engine
from kvstrata.integration.vllm.connector import KVStrataConnector
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState
from kvstrata.server import protocol as p
from kvstrata.server.client import Pending

LESSON_TOKENS = 32  # of a block
RECURRENT = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))


def blending_config(folder: Path, role: str = "kv_both") -> VllmConfig:
    config = vllm_config(folder)
    config.kv_transfer_config = KVTransferConfig(kv_connector="BlendConnector", kv_role=role)
    return config


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([group(chunked())], "ChunkedLocalAttentionSpec is neither full attention nor a sliding"),
        ([group(full(attention_chunk_size=128))], "reaches back to the beginning of a chunk"),
        (
            [group(full(), 2), group(sliding(), 2, first=2)],
            "2 KV cache groups\n  hint: start with --disa",
        ),
        ([group(RECURRENT)], "MambaSpec is neither full attention nor a sliding window"),
    ],
)
def test_an_engine_that_cannot_blend_is_refused(
    folder: Path, groups: list[KVCacheGroupSpec], reason: str
) -> None:
    config = blending_config(folder)
    with pytest.raises(ConfigError, match=reason):
        refuse_engine(load_config({}, environ={}), config, plan(config, *groups))


@pytest.mark.parametrize(
    ("part", "changes", "reason", "remedy"),
    [
        (
            "parallel_config",
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size is 2, so that no rank has the whole model",
            "set pipeline_parallel_size to 1",
        ),
        (
            "parallel_config",
            {"data_parallel_size": 2},
            "data_parallel_size is 2: .* one engine cannot run them alone",
            "set data_parallel_size to 1",
        ),
        (
            "model_config",
            {"multimodal_config": object()},
            "the model is '.*': positions of a multimodal model",
            "set model to one of text alone",
        ),
        (
            None,
            {"speculative_config": SimpleNamespace(method="eagle3")},
            "the method of speculative_config is 'eagle3'",
            r"set it to one that finds drafts in the tokens \(ngram, ngram_gpu, suffix\)",
        ),
    ],
)
def test_an_engine_that_cannot_run_its_model_within_a_step_is_refused(
    folder: Path, part: str | None, changes: dict[str, object], reason: str, remedy: str
) -> None:
    config = blending_config(folder)
    planned = plan(config, group(full()))
    for name, value in changes.items():
        setattr(config if part is None else getattr(config, part), name, value)
    whole = (
        f"cannot blend here: {reason}[^;]*\n  hint: {remedy}.*, or set kv_connector to KVS[^;]*$"
    )
    with pytest.raises(ConfigError, match=whole):
        refuse_engine(load_config({}, environ={}), config, planned)


def test_what_has_several_reasons_or_one_without_a_remedy_says_so(folder: Path) -> None:
    config = blending_config(folder)
    planned = plan(config, group(full()))
    config.parallel_config.pipeline_parallel_size = 2
    settings = load_config({"load_mode": "layerwise"}, environ={})
    hint = "hint: take load_mode away and set pipeline_parallel_size to 1 .*, or set kv_connector"
    with pytest.raises(ConfigError, match=hint):
        refuse_engine(settings, config, planned)
    with pytest.raises(ConfigError, match=r"; ChunkedLocal.*\n  hint: set kv_con"):
        refuse_engine(settings, config, plan(config, group(chunked())))


def test_an_engine_with_kv_of_another_type_is_refused(folder: Path) -> None:
    config = blending_config(folder)
    config.cache_config.cache_dtype = "int8_per_token_head"
    with pytest.raises(
        ConfigError, match="kv_cache_dtype is int8_per_token_head, and must be auto"
    ):
        refuse_engine(load_config({}, environ={}), config, plan(config, group(full())))


def test_an_engine_that_saves_nothing_is_refused(folder: Path) -> None:
    config = blending_config(folder, "kv_consumer")
    whole = "kv_role is 'kv_consumer': .* saves nothing\n  hint: set kv_role to kv_both, or set"
    with pytest.raises(ConfigError, match=whole):
        refuse_engine(load_config({}, environ={}), config, plan(config, group(full())))


@pytest.mark.parametrize(
    ("device", "attention", "kept", "reason"),
    [
        ("cuda", "auto", "auto", "attention is MLA, which blends on CPUs with AMX, and this is cu"),
        ("cpu", "gathered", "auto", "attention is MLA, and blend_attention is 'gathered'"),
        ("cpu", "auto", "fp8", "kv_cache_dtype is fp8, and must be auto where attention is MLA"),
    ],
)
def test_latents_are_refused_but_plain_and_on_a_cpu(
    folder: Path, device: str, attention: str, kept: str, reason: str
) -> None:
    config = blending_config(folder)
    config.device_config.device_type = device
    config.cache_config.cache_dtype = kept
    settings = load_config({"blend_attention": attention}, environ={})
    with pytest.raises(ConfigError, match=reason):
        refuse_engine(settings, config, plan(config, group(mla())))


@pytest.mark.parametrize("spec", [full(), full(sliding_window=64), sliding(), mla()])
def test_an_engine_with_windows_or_latents_is_let_in(folder: Path, spec: KVCacheSpec) -> None:
    config = blending_config(folder)
    refuse_engine(load_config({}, environ={}), config, plan(config, group(spec)))


@pytest.mark.parametrize(
    ("device", "attention", "reason"),
    [
        ("xpu", "auto", "it runs on CPUs and GPUs, and this is xpu"),
        ("cuda", "runs", "blend_attention is 'runs', which is for CPUs, and this is cuda"),
    ],
)
def test_a_device_that_cannot_blend_so_is_refused(
    folder: Path, device: str, attention: str, reason: str
) -> None:
    config = blending_config(folder)
    config.device_config.device_type = device
    settings = load_config({"blend_attention": attention}, environ={})
    with pytest.raises(ConfigError, match=reason):
        refuse_engine(settings, config, plan(config, group(full())))


@pytest.mark.parametrize("attention", ["auto", "gathered"])
def test_a_gpu_is_let_in(folder: Path, attention: str) -> None:
    config = blending_config(folder)
    config.device_config.device_type = "cuda"
    settings = load_config({"blend_attention": attention}, environ={})
    refuse_engine(settings, config, plan(config, group(full())))


def settings_of(path: Path, **settings: Any) -> dict[str, Any]:
    """Of an engine whose server is not there."""
    return {"server": "attached", "socket": str(path / "nobody"), **settings}


def test_layers_that_the_model_does_not_have_are_named(folder: Path, tmp_path: Path) -> None:
    config = blending_config(folder)
    settings = load_config(settings_of(tmp_path, blend_scored_layers=[0, 2]), environ={})
    with pytest.raises(ConfigError, match=r"\[0, 2\], and the model has 2 attention layers"):
        BlendScheduler(settings, config, plan(config, group(full(), 2)))


def test_a_match_ratio_is_said_to_change_nothing(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = blending_config(folder)
    settings = load_config(settings_of(tmp_path, min_match_ratio=0.8), environ={})
    BlendScheduler(settings, config, plan(config, group(full(), 2))).close()
    assert "min_match_ratio 0.8 changes nothing" in caplog.text


@pytest.mark.parametrize(("rule", "said"), [("boundary", 1), ("full", 1), ("random", 0)])
def test_a_ratio_in_the_settings_is_said_to_change_nothing_where_the_rule_has_its_own(
    bench: Bench, caplog: pytest.LogCaptureFixture, rule: str, said: int
) -> None:
    bench.engine(connector=BlendConnector, blend_rule=rule, recompute_ratio=0.3)
    told = f"recompute_ratio is 0.3, which changes nothing: blend_rule is {rule}, which always"
    assert caplog.text.count(told) == said
    bench.engine(connector=BlendConnector, blend_rule=rule)
    assert caplog.text.count("which changes nothing") == said


@pytest.mark.parametrize(
    ("setting", "value", "followed_by"),
    [
        ("recompute_boundary", 5, {"boundary"}),
        ("recompute_first_tokens", 2, {"two_round_query", "query", "hkvd", "random"}),
        ("blend_scored_layers", [0], {"two_round_query", "query", "hkvd"}),
    ],
)
def test_a_setting_that_the_rule_does_not_go_by_is_said_to_change_nothing(
    bench: Bench,
    caplog: pytest.LogCaptureFixture,
    setting: str,
    value: object,
    followed_by: set[str],
) -> None:
    for rule in ("two_round_query", "query", "hkvd", "boundary", "random", "full"):
        caplog.clear()
        bench.engine(connector=BlendConnector, blend_rule=rule, **{setting: value})
        told = f"{setting} is set, which changes nothing: blend_rule is {rule}"
        assert caplog.text.count(told) == (rule not in followed_by)
        assert caplog.text.count("which changes nothing") == (rule not in followed_by)


def asker(request_id: str, salt: str) -> Any:
    return SimpleNamespace(request_id=request_id, salt=salt)


def test_who_is_not_blended_any_more_is_told_by_a_request_and_never_by_its_salt(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = blending_config(folder)
    half = BlendScheduler(
        load_config(settings_of(tmp_path, blend="all"), environ={}),
        config,
        plan(config, group(full(), 2)),
    )
    far = Audit(3.0, agrees=False)
    for salt, told in (("hush", "the cache_salt of request cmpl-7"), ("", "no cache_salt")):
        for number in range(9):
            caplog.clear()
            half._judge(asker(f"cmpl-{number}", salt), far)
            assert ("are not blended any more" in caplog.text) == (number == 7)
            if number == 7:
                assert f"requests with {told} are not" in caplog.text
                assert "diverge by 3 nats" in caplog.text
            assert "hush" not in caplog.text
    for number in range(8):
        half._judge(asker("cmpl", f"hush-{number}"), far)
    assert "requests with a cache_salt that has had few audits are not blended" in caplog.text
    assert "hush" not in caplog.text
    assert [*half._counted.data["gauges"].values()] == [10]
    half.close()


def test_a_prompt_that_is_too_short_to_be_worth_it_is_not_searched(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = blending_config(folder)
    settings = load_config(settings_of(tmp_path, blend="all"), environ={})
    half = BlendScheduler(settings, config, plan(config, group(full(), 2)))
    monkeypatch.setattr(Learning, "runs", None)
    params = SamplingParams(max_tokens=1)
    for tokens, first, result in (
        (1024, 0, "few_tokens"),
        (1100, 96, "few_tokens"),
        (99, 98, "no_run"),
    ):
        request = Request("short", [0] * tokens, params, None)
        assert half._candidate(request, first).result == result
    half.close()


WORTH_IT = {
    "blend_chunk_size": 2 * TOKENS,
    "blend_min_saved_tokens": 40,
    "blend_min_saved_share": 0,
}


def test_a_request_that_asks_in_vain_is_told_of_once_for_each_reason(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    engine = bench.engine(connector=BlendConnector, **WORTH_IT)
    caplog.set_level(logging.INFO, "kvstrata")
    asked = {"blend": True}
    for name, seed, length, transfer in (
        ("quiet", 1, 70, None),
        ("short", 2, 30, asked),
        ("unknown", 3, 70, asked),
        ("short too", 4, 20, asked),
        ("unknown too", 5, 70, asked),
        ("confused", 6, 70, {"blend": "perhaps"}),
    ):
        engine.add(name, prompt(seed, length), 2, transfer)
        engine.run()
    said = [r.getMessage() for r in caplog.records if "blended and was not" in r.getMessage()]
    assert [line.partition(";")[0] for line in said] == [
        "request short asked to be blended and was not: few_tokens",
        "request unknown asked to be blended and was not: no_run",
    ]


def asking(text: list[int], salt: str | None = None, name: str = "later") -> Request:
    """One that asks for *text* to be reused a token further to the right."""
    params = SamplingParams(
        max_tokens=2, extra_args={"kv_transfer_params": {"blend": {"ratio": 0}}}
    )
    hasher = get_request_block_hasher(4, sha256)
    return Request(name, [7, *text, 7], params, None, cache_salt=salt, block_hasher=hasher)


def test_what_is_learned_of_a_tenant_is_reused_by_no_other(bench: Bench) -> None:
    engine = bench.engine(connector=BlendConnector, **WORTH_IT)
    half: Any = engine.half
    text = prompt(1, 10 * TOKENS)
    engine.add("first", text, 2, cache_salt="A")
    engine.run()

    runs = {s: half._learning.runs(asking(text, s), half._namespace, 0) for s in ("A", "B", None)}
    assert {s: each.tokens for s, each in runs.items()} == {"A": 10 * TOKENS, "B": 0, None: 0}
    results = {s: half._candidate(asking(text, s), 0).result for s in ("B", None)}
    assert results == {"B": "no_run", None: "no_run"}


def test_what_was_still_being_saved_when_it_was_asked_for_is_not_taken_for_lost(
    bench: Bench,
) -> None:
    engine = bench.engine(connector=BlendConnector, **WORTH_IT)
    half: Any = engine.half
    text = prompt(1, 10 * TOKENS)
    copies = Copies(engine)
    copies.hold()
    engine.add("said", text, 20)
    while half._requests["said"].offered_blocks < 10:
        engine.step()
    candidate = half._candidate(asking(text), 0)
    lookup = half._ask(asking(text), candidate.runs)

    def is_settled() -> bool:
        half._link.poll(0.01)
        return bool(lookup.is_settled(half._config))

    eventually(is_settled, "no answer")
    copies.go()
    engine.run()
    half._settle(asking(text), candidate, lookup)
    assert candidate.plan is None
    assert half._learning.runs(asking(text), half._namespace, 0).tokens == 10 * TOKENS
    assert half._saves.under_way() == set()


def taught(bench: Bench, **settings: Any) -> tuple[Engine, list[int]]:
    """An engine, and what it has saved."""
    engine = bench.engine(connector=BlendConnector, **WORTH_IT, **settings)
    text = prompt(1, 10 * TOKENS)
    engine.serve("said", text, 2)
    bench.hears()
    return engine, text


def test_what_is_offered_stays_the_same_until_vllm_does_not_take_it_and_is_undone_then(
    bench: Bench,
) -> None:
    engine, text = taught(bench)
    half: Any = engine.half
    asked, plain = asking(text), asking(text, name="plain")
    half.on_new_request(asked)
    offers: list[tuple[tuple[int | None, bool], list[bytes]]] = []

    def is_offered() -> bool:
        offers.append((half.match(asked, 0), list(asked.block_hashes)))
        return offers[-1][0][0] is not None

    eventually(is_offered, "no answer")
    is_offered()
    assert offers[-1] == offers[-2]
    offered, names = offers[-1]
    assert offered == (10 * TOKENS, True)
    assert not {*names} & {*plain.block_hashes}

    half.allocated(asked, lambda: ([],), 0)
    assert asked.block_hashes == plain.block_hashes
    eventually(bench.nothing_is_leased, "what is not taken stays leased")
    half.finished(asked, ([],))
    half.take_stats()  # in which its end is counted


def answer_late(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = KVManager.get_match

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return real(*args, **kwargs)

    monkeypatch.setattr(KVManager, "get_match", slow)


@pytest.mark.parametrize(("answer_seconds", "tokens"), [(0.1, 10 * TOKENS), (2.0, None)])
def test_an_answer_that_spares_so_much_is_waited_for_longer_also_beside_other_requests(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, answer_seconds: float, tokens: int | None
) -> None:
    engine, text = taught(bench, lookup_wait_seconds=0.05, lookup_timeout_seconds=PATIENCE_SECONDS)
    half: Any = engine.half
    for name in ("other", "another"):
        engine.add(name, prompt(2, 8), 40)
    engine.step()
    assert half._lookup_wait_seconds == 0.05
    answer_late(monkeypatch, answer_seconds)
    asked = asking(text)
    assert half._match_runs(asked, 0) == tokens
    half._drop(asked)
    engine.run()


def test_lookups_of_a_step_are_waited_for_as_long_as_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, text = taught(bench, lookup_wait_seconds=0.01, lookup_timeout_seconds=PATIENCE_SECONDS)
    half: Any = engine.half
    answer_late(monkeypatch, 2.0)
    asked = [asking(text, name=name) for name in "abcd"]
    waited: list[float] = []
    hear = half._link.hear

    def spy(is_true: Callable[[], bool], until: float) -> None:
        waited.append(until - time.monotonic())
        hear(is_true, until)

    monkeypatch.setattr(half._link, "hear", spy)
    assert [half._match_runs(each, 0) for each in asked] == [None] * 4
    assert waited[0] > 0.1
    assert max(waited[1:]) <= half._lookup_wait_seconds == 0.04
    for each in asked:
        half._drop(each)


def test_a_server_that_is_silent_about_runs_is_asked_nothing_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, text = taught(bench, lookup_wait_seconds=0.01, lookup_timeout_seconds=0.1)
    half: Any = engine.half
    answer_late(monkeypatch, 1.0)
    asked = asking(text)
    eventually(lambda: half._match_runs(asked, 0) == 0, "a silent server is waited for")
    assert not half._link.ready
    half._drop(asked)


def test_a_server_that_has_answered_for_some_runs_in_time_is_asked_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has said is blended."""
    engine, text = taught(bench, lookup_wait_seconds=0.01, lookup_timeout_seconds=1.0)
    half: Any = engine.half
    with monkeypatch.context() as patch:
        answer_late(patch, 0.1)
        asked = asking([*text[: 8 * TOKENS], 7, 7, 7, *text[8 * TOKENS :]])
        assert half._match_runs(asked, 0) is None
    lookup = half._candidates["later"].lookup
    assert len(lookup._pending) > 1
    late, lookup._pending[-1] = lookup._pending[-1], Pending(0)
    eventually(lambda: half._match_runs(asked, 0) is not None, "an answer is waited for")
    assert half._match_runs(asked, 0) > 0
    assert half._link.ready
    half._link.abandon(late, lookup.connection)
    half._drop(asked)


def test_lookups_of_runs_count_among_those_that_keep_half_of_the_host_tier(
    folder: Path,
) -> None:
    with start(folder, 4 * 10 - 1) as bench:
        engine, text = taught(bench)
        half: Any = engine.half
        first, second = asking(text, name="first"), asking(text, name="second")
        assert half._match_runs(first, 0) == 10 * TOKENS
        assert half._match_runs(second, 0) is None
        half._drop(first)
        assert half._match_runs(second, 0) == 10 * TOKENS
        half._drop(second)
        assert not half._loads.ahead._blocks


def test_leases_of_runs_that_are_not_reused_are_given_back(bench: Bench) -> None:
    init_none_hash(sha256)
    engine = bench.engine()
    engine.serve("one", prompt(1, 4 * TOKENS), 2)
    bench.hears()
    link, ahead, namespace = engine.half._link, engine.half._loads.ahead, engine.half._namespace
    keys = as_key_array(engine.half._math.keys(engine.requests["one"], 0, 4))
    runs = Runs(
        start=np.array([0, 2 * TOKENS]),
        length=np.array([2 * TOKENS, 2 * TOKENS - 3]),
        delta=np.array([0, 5]),
        generation=np.zeros(2, np.int8),
        skip=np.array([0, 3]),
        key_offsets=np.array([0, 2, 4]),
        keys=keys,
        tokens_per_block=TOKENS,
    )

    unheard = RunLookup(link, ahead, namespace, runs, "late")
    assert unheard.found().task_ids == []  # nobody has listened to the answers
    unheard.abandon()
    eventually(bench.nothing_is_leased, "what is answered late stays leased")

    lookup = RunLookup(link, ahead, namespace, runs, "in time")

    def is_settled() -> bool:
        link.poll(0.01)
        return lookup.is_settled(engine.half._config)

    eventually(is_settled, "no answer")
    found = lookup.found()
    assert found.length.tolist() == [2 * TOKENS, 2 * TOKENS - 3]
    assert found.first_row.tolist() == [0, 2 * TOKENS + 3]
    assert len(found.slots) == len(found.generations) == 4
    assert not len(found.missing)
    lookup.abandon(but=found.task_ids[:1])
    link.submit(p.Launch(found.task_ids[:1]))
    link.submit(p.Complete(found.task_ids[:1]))
    eventually(bench.nothing_is_leased, "a run that is not reused stays leased")


def settled_lookup(engine: Engine) -> RunLookup:
    """Of a run in two blocks that the engine has saved, and one that nobody has."""
    link, namespace = engine.half._link, engine.half._namespace
    known = engine.half._math.keys(engine.requests["one"], 0, 2)
    runs = Runs(
        start=np.array([7]),
        length=np.array([3 * TOKENS - 2]),
        delta=np.array([6]),
        generation=np.zeros(1, np.int8),
        skip=np.array([1]),
        key_offsets=np.array([0, 3]),
        keys=as_key_array([*known, b"x" * 32]),
        tokens_per_block=TOKENS,
    )
    lookup = RunLookup(link, engine.half._loads.ahead, namespace, runs, "r")

    def is_settled() -> bool:
        link.poll(0.01)
        return lookup.is_settled(engine.half._config)

    eventually(is_settled, "no answer")
    return lookup


def test_what_the_server_does_not_have_is_named(bench: Bench) -> None:
    engine = bench.engine()
    engine.serve("one", prompt(1, 2 * TOKENS), 2)
    bench.hears()
    lookup = settled_lookup(engine)
    found = lookup.found()
    assert found.length.tolist() == [2 * TOKENS - 1]
    assert [bytes(key) for key in found.missing] == [b"x" * 32]
    lookup.abandon()
    eventually(bench.nothing_is_leased, "an abandoned lookup keeps its leases")


def test_what_the_server_cannot_look_for_is_not_taken_for_lost(bench: Bench) -> None:
    engine = bench.engine()
    engine.serve("one", prompt(1, 2 * TOKENS), 2)
    bench.hears()
    engine.attachments[0].close()
    eventually(
        lambda: all(each["workers"] == [] for each in bench.manager.stats().engines),
        "the worker does not go",
    )
    found = settled_lookup(engine).found()
    assert len(found.slots) == len(found.missing) == 0


def test_what_is_still_searched_for_is_not_taken_for_lost(bench: Bench) -> None:
    engine = bench.engine()
    engine.serve("one", prompt(1, 2 * TOKENS), 2)
    bench.hears()
    lookup = settled_lookup(engine)
    (pending,) = lookup._pending
    assert pending is not None
    assert pending.status is not None
    pending.status = msgspec.structs.replace(pending.status, state=TaskState.SEARCHING)
    found = lookup.found()
    assert (len(found.slots), len(found.missing)) == (2, 0)
    lookup.abandon()


@pytest.mark.parametrize("setting", [{"blend": "all"}, {"recompute_ratio": 0.3, "head_dim": 128}])
def test_settings_of_blending_are_refused_where_nothing_blends(
    folder: Path, setting: dict[str, Any]
) -> None:
    config = vllm_config(folder)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVStrataConnector", kv_role="kv_both", kv_connector_extra_config=setting
    )
    said = f"{', '.join(sorted(setting))} is set, and KVStrataConnector does not blend"
    with pytest.raises(ConfigError, match=said):
        KVStrataConnector(config, KVConnectorRole.SCHEDULER, plan(config, group(full())))


@dataclass
class Lesson:
    """What a scheduler half learns of, and who asks for it."""

    half: BlendScheduler
    said: Request
    later: Request

    def known(self) -> int:
        """Blocks of *said* that are known."""
        runs = self.half._learning.runs(self.later, self.half._namespace, 0)
        return int(runs.length.sum()) // LESSON_TOKENS


@pytest.fixture
def lesson(folder: Path, tmp_path: Path) -> Iterator[Lesson]:
    """Of eight blocks; chunks are three."""
    config, tokens = blending_config(folder), LESSON_TOKENS
    settings = settings_of(tmp_path, tokens_per_block=tokens, blend_chunk_size=3 * tokens)
    half = BlendScheduler(load_config(settings, environ={}), config, plan(config, group(full(), 2)))
    half.bind_block_pool(BlockPool(2, True, tokens))
    text = prompt(1, 8 * tokens)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(tokens, sha256)
    said, later = (
        Request(name, ids, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        for name, ids in (("said", text), ("later", [7, *text, 7]))
    )
    yield Lesson(half, said, later)
    half.close()


def test_blocks_that_come_one_by_one_are_known_once_they_are_a_chunk(lesson: Lesson) -> None:
    learning, found = lesson.half._learning, []
    for block in range(8):
        learning.saved(lesson.said, lesson.half._namespace, block, block + 1)
        found.append(lesson.known())
    assert found == [0, 0, 3, 3, 3, 6, 6, 6]
    learning.finished("said")
    assert learning._next == {}


def test_stretches_over_reused_kv_are_known_each_by_itself(lesson: Lesson) -> None:
    """The third, fourth and eighth block are reused: what is between stretches is not new."""
    learning, found = lesson.half._learning, []
    for first, end in ((4, 5), (0, 2), (5, 7)):
        stretch = 0 if first < 4 else 4
        learning.saved(lesson.said, lesson.half._namespace, first, end, stretch)
        found.append(lesson.known())
    assert found == [0, 0, 3]
    learning.saved(lesson.said, lesson.half._namespace, 0, 8)
    assert lesson.known() == 8
    learning.finished("said")
    assert learning._next == {}


def test_what_a_step_offers_is_indexed_in_the_next_one(lesson: Lesson) -> None:
    learning = lesson.half._learning
    learning.saved(lesson.said, lesson.half._namespace, 0, 8)
    assert learning._index.statistics().tokens == 0
    lesson.half.plan(SchedulerOutput.make_empty())
    assert learning._index.statistics().tokens == 8 * LESSON_TOKENS
    assert lesson.known() == 8


def test_what_is_lost_or_reset_before_it_is_indexed_is_not_known(lesson: Lesson) -> None:
    learning = lesson.half._learning
    learning.saved(lesson.said, lesson.half._namespace, 0, 8)
    learning.lost(as_key_array(lesson.half._math.keys(lesson.said, 0, 8)))
    assert lesson.known() == 0
    learning.saved(lesson.said, lesson.half._namespace, 0, 8)
    lesson.half.reset()
    learning.catch_up()
    assert learning._index.statistics().tokens == 0


def test_a_step_that_also_blends_does_not_say_how_fast_prompts_are_computed(
    lesson: Lesson,
) -> None:
    half: Any = lesson.half
    step = SchedulerOutput.make_empty()
    step.num_scheduled_tokens, step.total_num_scheduled_tokens = {"long": 512}, 512
    # The workers compute what this one chooses, too.
    half._running[1] = SimpleNamespace(is_alone=True)
    half.plan(step)
    del half._running[1]
    half.plan(step)
    assert half._rate.tokens_per_second is None
    half.plan(step)
    measured = half._rate.tokens_per_second
    assert measured is not None
