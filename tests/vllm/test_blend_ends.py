"""How blending ends, told to vLLM's own scheduler by a worker that has no model to blend with."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
from tests.caches import eventually
from tests.vllm.bench import Bench, prompt
from tests.vllm.driven import Engine
from tests.vllm.fake_runner import DEVICE_TOKENS, TOKENS, continuation
from tests.vllm.faults import Again
from tests.vllm.plans import full, group, sliding
from tests.vllm.test_blend_scheduler import asking
from vllm.v1.request import RequestStatus

from kvstrata.blend.audit import Audit
from kvstrata.integration.vllm.blend.connector import BlendConnector
from kvstrata.integration.vllm.blend.metadata import BlendRequestMeta
from kvstrata.integration.vllm.metadata import StepPlan, WorkerReport

KNOWN = 10 * TOKENS
ANSWER_SECONDS = 0.3  # in which the server has answered
SETTINGS = {
    "blend_chunk_size": 2 * TOKENS,
    "blend_min_saved_tokens": 40,
    "blend_min_saved_share": 0,
}


def answers_come_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has answered before vLLM goes on, so that what it can begin it begins in one step."""
    link = engine.half._link
    poll = link.poll
    monkeypatch.setattr(link, "poll", lambda seconds: poll(max(seconds, ANSWER_SECONDS)))


class Ends:
    """Ends what is to be blended in the step that begins it: *whole*, all of it exact, or failed.

    While it is *held*, nothing ends.
    """

    def __init__(self, engine: Engine, *, whole: bool, audited: bool = True) -> None:
        self.held = False
        self.begun: list[BlendRequestMeta] = []
        self.budgets: list[tuple[int, int]] = []  # to move and to run, of steps that begin some
        self.counts: Counter[str] = Counter()
        self._engine, self._whole = engine, whole
        self._audited = whole and audited
        self._ended: list[BlendRequestMeta] = []
        for owner, name, around in (
            (engine.runner.half, "start_load", self._start_load),
            (engine.runner.half, "collect", self._collect),
            (engine.runner.half, "report", self._report),
            (engine.half, "take_stats", self._take_stats),
        ):
            inner: Any = getattr(owner, name)
            setattr(owner, name, lambda *args, i=inner, a=around: a(i(*args), *args))

    def _start_load(self, _: None, plan: StepPlan) -> None:
        if plan.blend is None:
            return
        if plan.blend.requests:
            self.budgets.append((plan.blend.most_moved, plan.blend.most_run))
        for request in plan.blend.requests:
            self._ended.append(request)
            blocks, tokens = request.device_blocks.tolist(), request.tokens.tolist()
            self._engine.runner.fill(blocks, tokens[: request.plan.end])

    def _collect(self, found: tuple[set[str], set[str]]) -> tuple[set[str], set[str]]:
        if self.held:
            return found
        received, failed = found
        ids = {request.request_id for request in self._ended}
        return received | ids, failed if self._whole else failed | ids

    def _report(self, found: WorkerReport | None) -> WorkerReport | None:
        if self.held:
            return found
        ended, self._ended = self._ended, []
        self.begun += ended
        names = {request.task_ids[0] for request in ended}
        ours = WorkerReport(
            load_done=dict.fromkeys(names, self._engine.runner.half.bit),
            load_failed=set() if self._whole else names,
            audits=dict.fromkeys(names, Audit(1.5, agrees=False)) if self._audited else {},
        )
        return ours if found is None else ours.aggregate(found)

    def _take_stats(self, found: Any) -> Any:
        if found is not None:
            self.counts.update(found.data["counters"])
        return found


def blended(bench: Bench, *, whole: bool, twice: bool = False) -> Ends:
    """What became of a request whose prompt stood one token further to the left before."""
    engine = bench.engine(connector=BlendConnector, **SETTINGS)
    ends = Ends(engine, whole=whole)
    text = prompt(1, KNOWN)
    engine.serve("known", text, 2)
    bench.hears()
    engine.forget_device()
    again = Again(engine.connector)
    again.on = twice
    asked = [7, *text, 7]
    request = engine.add("asked", asked, 12, {"blend": {"ratio": 0}})
    engine.run()
    again.on = False
    assert list(request.output_token_ids) == continuation(asked, 12)
    assert [each.request_id for each in ends.begun] == ["asked"]
    assert not any(engine.leftovers().values())
    return ends


@pytest.mark.parametrize("twice", [False, True])
def test_an_audit_counts_once_however_often_it_is_reported(bench: Bench, twice: bool) -> None:
    counts = blended(bench, whole=True, twice=twice).counts
    assert counts["kvstrata_blend_audits_total|other"] == 1
    assert counts["kvstrata_blend_audit_divergence_total"] == 1.5
    assert counts["kvstrata_blend_requests_total|blended"] == 1


@pytest.mark.parametrize("whole", [True, False])
def test_tokens_that_were_blended_in_vain_count_as_neither_reused_nor_spared(
    bench: Bench, whole: bool
) -> None:
    counts = blended(bench, whole=whole).counts
    assert counts["kvstrata_blend_requests_total|" + ("blended" if whole else "failed")] == 1
    reused, spared = (counts[f"kvstrata_blend_tokens_total|{k}"] for k in ("reused", "spared"))
    assert (reused, spared > 0) == ((KNOWN - 1, True) if whole else (0, False))


@pytest.mark.parametrize("whole", [True, False])
def test_blocks_that_were_blended_in_vain_count_as_a_failed_load(bench: Bench, whole: bool) -> None:
    (begun,) = blended(bench, whole=whole).begun
    counters = bench.counters()
    names = ("loaded_blocks", "spared_prefill_tokens", "failed_loads")
    loaded, spared, failed = (counters[f"kvstrata_{name}_total"] for name in names)
    assert failed == (0 if whole else len(begun.task_ids))
    assert (loaded > 0, spared) == (whole, loaded * TOKENS)
    assert len(bench.saved_keys()) >= KNOWN // TOKENS  # nothing is wrong with the blocks


def test_an_aborted_blend_is_no_failed_load(bench: Bench) -> None:
    engine = bench.engine(connector=BlendConnector, **SETTINGS)
    ends = Ends(engine, whole=False)
    text = prompt(1, KNOWN)
    engine.serve("known", text, 2)
    bench.hears()
    engine.forget_device()
    ends.held = True
    engine.add("asked", [7, *text, 7], 12, {"blend": {"ratio": 0}})

    def has_begun() -> bool:
        engine.step()
        return bool(ends.budgets)

    eventually(has_begun, "it is not blended")
    engine.scheduler.finish_requests(["asked"], RequestStatus.FINISHED_ABORTED)
    ends.held = False
    engine.run()
    assert bench.counters()["kvstrata_failed_loads_total"] == 0
    assert not any(engine.leftovers().values())


def test_a_step_that_other_prompts_fill_leaves_blending_a_quarter_of_its_tokens(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engine(connector=BlendConnector, **SETTINGS)
    ends = Ends(engine, whole=True)
    text = prompt(1, KNOWN)
    engine.serve("known", text, 2)
    bench.hears()
    engine.forget_device()
    answers_come_at_once(engine, monkeypatch)
    half: Any = engine.half
    step_tokens = half._step_tokens
    engine.add("asked", [7, *text, 7], 12, {"blend": {"ratio": 0}})
    engine.add("long", prompt(2, 4 * step_tokens), 1)
    engine.run()
    assert ends.budgets == [(step_tokens, step_tokens // 4)]
    assert not any(engine.leftovers().values())


@pytest.mark.parametrize("together", [True, False])
def test_a_prefix_that_others_compute_in_the_same_step_is_waited_for(
    bench: Bench, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engine(connector=BlendConnector, **SETTINGS)
    ends = Ends(engine, whole=True)
    document, system = prompt(1, KNOWN), prompt(2, 3 * TOKENS)
    engine.serve("known", document, 2)
    bench.hears()
    engine.forget_device()
    answers_come_at_once(engine, monkeypatch)
    if not together:
        engine.serve("first", [*system, 5], 1)
    else:
        engine.add("first", [*system, 5], 1)
    engine.add("asked", [*system, 7, *document, 7], 12, {"blend": {"ratio": 0}})
    engine.run()
    (begun,) = ends.begun
    assert begun.plan.exact_end == len(system)
    assert begun.awaits_step is together
    assert not any(engine.leftovers().values())


@pytest.mark.parametrize(
    ("window", "whole", "again", "saved", "known"),
    [
        (None, True, True, 3, 3 * TOKENS),
        (None, True, False, 0, 0),
        (None, False, True, 12, 4 * TOKENS - 1),  # a prefill, learned in two parts
        (6 * TOKENS, True, True, 2, 2 * TOKENS),  # of the first there is nothing any more
        (4 * TOKENS, True, True, 0, 0),
    ],
)
def test_what_is_new_behind_reused_tokens_is_known_from_then_on_if_that_is_wanted(
    bench: Bench, window: int | None, *, whole: bool, again: bool, saved: int, known: int
) -> None:
    """Blocks 5 to 7 of a prompt are all of them new, block 4 and block 8 in part."""
    kind = full if window is None else partial(sliding, sliding_window=window)
    groups = [group(kind(block_size=DEVICE_TOKENS))]
    engine = bench.engine(connector=BlendConnector, groups=groups, blend_again=again, **SETTINGS)
    ends = Ends(engine, whole=whole, audited=False)
    first, new, second = (prompt(number, 4 * TOKENS) for number in range(1, 4))
    for number, text in enumerate((first, second)):
        engine.serve(f"known-{number}", text, 2)
    before = bench.saved_keys()
    engine.forget_device()
    engine.add("asked", [7, *first, *new, *second, 7], 2, {"blend": {"ratio": 0}})
    engine.run()
    assert len(ends.begun) == 1
    assert len(bench.saved_keys() - before) == saved
    half: Any = engine.half
    assert half._learning.runs(asking(new), half._namespace, 0).tokens == known
    assert not any(engine.leftovers().values())


def results_of_six(
    bench: Bench, *, prefill_rate: float, together: bool = False, audited: bool = False, **own: Any
) -> dict[str, int]:
    """What becomes of six requests of about one size, where *prefill_rate* tokens a second are
    computed."""
    engine = bench.engine(connector=BlendConnector, **SETTINGS, **own)
    ends = Ends(engine, whole=True, audited=audited)
    text = prompt(1, KNOWN)
    engine.serve("known", text, 2)
    bench.hears()
    engine.forget_device()
    half: Any = engine.half
    half._rate.tokens_per_second = prefill_rate
    for number in range(6):
        engine.add(f"asked-{number}", [number, *text, 7], 2, {"blend": {"ratio": 0}})
        if not together:
            engine.run()
    engine.run()
    engine.half.take_stats()
    assert not any(engine.leftovers().values())
    name = "kvstrata_blend_requests_total|"
    found = {k.removeprefix(name): n for k, n in ends.counts.items() if k.startswith(name)}
    return {result: number for result, number in found.items() if result != "not_asked"}


ENDLESS, NO_TIME = 1e-9, 1e15  # what a prefill takes, at so many tokens a second


@pytest.mark.parametrize(
    ("prefill_rate", "own", "expected"),
    [
        (NO_TIME, {}, {"blended": 5, "slower": 1}),
        (NO_TIME, {"blend_if_slower": True}, {"blended": 6}),
        (NO_TIME, {"together": True}, {"blended": 6}),
        (NO_TIME, {"audited": True}, {"blended": 6}),
        (ENDLESS, {}, {"blended": 6}),
    ],
)
def test_what_has_taken_longer_than_a_prefill_is_computed(
    bench: Bench, prefill_rate: float, own: dict[str, Any], expected: dict[str, int]
) -> None:
    """By those that nothing else was done beside, and that were not computed exactly as well."""
    assert results_of_six(bench, prefill_rate=prefill_rate, **own) == expected
