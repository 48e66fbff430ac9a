"""Rounds of contenders that die, with members that are no engines."""

import os
import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from kvstrata.bench import restarts, session
from kvstrata.bench.contenders import Deployment
from kvstrata.bench.fleet import EngineFailed
from kvstrata.bench.meter import Meter
from kvstrata.bench.models import Model
from kvstrata.bench.processes import ROLES, Role, Usage
from kvstrata.bench.record import Begun, Machine, Options, RunFolder
from kvstrata.bench.report import markdown, results_of
from kvstrata.bench.restarts import run_with_restart
from kvstrata.bench.session import Session
from kvstrata.bench.traffic import Answer, Conversation, Counters, Ran, Traffic, Turn
from kvstrata.bench.workloads import workloads

MODEL = Model("", "float32", 1024, 6144, 8448, 32, "a model")
MACHINE = Machine("a processor", 2, 1 << 34, "Linux", {}, "cpu", "0,1", "ext4")
BEGUN = Begun("2026-11-25 09:00 UTC", "kvstrata bench --rounds 2", "abc1234")


class Fake:
    """Answers at once; the first *lmcache* dies of its first traffic of several conversations, and
    the server of *kvstrata* is another one after each.
    """

    made: ClassVar[list[str]] = []
    began_with: ClassVar[list[Mapping[str, str]]] = []

    def __init__(self, name: str, _: Deployment, variables: Mapping[str, str]) -> None:
        self.name = name
        self.began_with.append(variables)
        self.has_ended = False
        self.server_pids = {1}
        self._dies = name == "lmcache" and name not in self.made
        self._traffic = Traffic([])
        self._asked = 0
        self.made.append(name)

    def wait_ready(self) -> None:
        """It always is."""

    settle = reset = hang_up = close = restart = kill_server = wait_ready

    def usage(self) -> dict[Role, Usage]:
        return {"client": Usage(), "engine": Usage(1.0), "worker": Usage(), "server": Usage(2.0)}

    def counters(self) -> Counters:
        return Counters()

    def run(self, traffic: Traffic) -> Ran:
        self.begin(traffic)
        return self.end()

    def begin(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def end(self) -> Ran:
        talks = self._traffic.conversations
        if len(talks) > 1:
            self.has_ended |= self._dies
            self.server_pids = {max(self.server_pids) + (self.name == "kvstrata")}
        if self.has_ended:
            raise EngineFailed(f"the engine of {self.name!r} has ended; its messages end:")
        self._asked += 1
        seconds = 0.5 if self._asked > 2 else 9.0  # it is cold itself
        return Ran(1.0, [Answer(n, 0, 9, 0, seconds, [], 1) for n in range(len(talks))])


class Remembering(Fake):
    """Is quick with a prompt that it has had before, and keeps it over a reset."""

    def __init__(self, name: str, plan: Deployment, variables: Mapping[str, str]) -> None:
        super().__init__(name, plan, variables)
        self._seen: set[tuple[int, ...]] = set()

    def end(self) -> Ran:
        answers = []
        for n, talk in enumerate(self._traffic.conversations):
            prompt = tuple(talk.turns[0].tokens)
            answers.append(Answer(n, 0, 9, 0, 0.024 if prompt in self._seen else 0.215, [], 1))
            self._seen.add(prompt)
        return Ran(1.0, answers)


class Silent:
    def say(self, doing: str) -> None:
        """Nobody listens."""

    def advance(self, share: float) -> None:
        """Nobody looks."""

    def end_round(self) -> None:
        """Nobody looks."""


class Heard(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.shares: list[list[float]] = [[]]  # of each round

    def say(self, doing: str) -> None:
        self.said.append(doing)

    def advance(self, share: float) -> None:
        self.shares[-1].append(share)

    def end_round(self) -> None:
        self.shares.append([])


def three(rounds: int) -> Options:
    return Options("quick", ("chat",), ("none", "kvstrata", "lmcache"), rounds=rounds)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Two rounds of a chat."""
    monkeypatch.setattr(Fake, "made", [])
    monkeypatch.setattr(Fake, "began_with", [])
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(session, "Member", Fake)
    monkeypatch.setattr(session, "measure_rates", lambda *_: {})
    options = three(2)
    folder = RunFolder(tmp_path / "run", options)
    Session(folder, options, MODEL, MACHINE, BEGUN, tmp_path, Silent()).go()
    return folder


def test_no_more_is_said_to_be_done_than_some_engine_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "Member", Fake)
    monkeypatch.setattr(session, "measure_rates", lambda *_: {})
    options = Options("quick", ("single",), ("none", "kvstrata"), rounds=1)
    folder, heard = RunFolder(tmp_path / "run", options), Heard()
    whole = Session(folder, options, MODEL, MACHINE, BEGUN, tmp_path, heard)
    whole.go()
    in_round, after = heard.shares
    assert after == []
    begun = [each for each in heard.said if each.startswith("single, round 1: ")]
    offered = list(workloads(None)["single"].steps(random.Random(0), whole._scale()))
    assert sum(in_round) == pytest.approx(len(begun) / len(offered))
    assert len(set(in_round)) == 2  # of steps that both engines take, and one
    steps = {each.removeprefix("single, round 1: ").partition(" hit")[0] for each in heard.said}
    assert {"host", "device"} < steps
    assert steps.isdisjoint({"disk", "remote"})
    assert heard.said[-1] == "single, round 1"


def test_how_long_a_cold_prompt_takes_is_asked_of_an_engine_that_is_warm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates of arrival and what is in time go by it."""
    monkeypatch.setattr(session, "Member", Fake)
    monkeypatch.setattr(session, "_COLD_TIMES", 1)
    monkeypatch.setattr(session, "measure_rates", lambda *_: {})
    options = Options("quick", ("chat",), ("none",), rounds=1)
    folder = RunFolder(tmp_path / "run", options)
    Session(folder, options, MODEL, MACHINE, BEGUN, tmp_path, Silent()).go()
    about = folder.about()
    assert about is not None
    assert about.cold_seconds == 0.5


def test_the_prompt_that_is_timed_cold_is_one_that_a_contender_by_itself_has_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache answers what warmed it up at once: arrivals came nine times too fast."""
    monkeypatch.setattr(session, "Member", Remembering)
    monkeypatch.setattr(session, "measure_rates", lambda *_: {})
    options = Options("quick", ("chat",), ("kvstrata",), rounds=1)
    folder = RunFolder(tmp_path / "run", options)
    Session(folder, options, MODEL, MACHINE, BEGUN, tmp_path, Silent()).go()
    about = folder.about()
    assert about is not None
    assert about.cold_seconds == 0.215


def test_an_engine_that_died_is_started_again_for_the_next_round(run: RunFolder) -> None:
    assert Fake.made == ["none", "kvstrata", "lmcache", "lmcache"]
    none, _, lmcache = results_of(run).figures("chat", "chat")
    assert (none.answers, none.failures) == (28, 0)
    # A turn that was never asked is a failure like one that was: 14 users, 4 turns each.
    assert (lmcache.answers, lmcache.failures) == (14, 56)


def test_all_engines_have_the_same_variables_and_compute_on_all_processors(run: RunFolder) -> None:
    assert run.measured()
    first, *others = Fake.began_with
    assert others == [first] * 3
    everywhere = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert first["VLLM_CPU_OMP_THREADS_BIND"] == everywhere


def test_what_a_server_that_was_replaced_has_used_is_not_known(run: RunFolder) -> None:
    none, kvstrata, _ = results_of(run).figures("chat", "chat")
    assert none.cpu_seconds.keys() == {"client", "engine", "worker", "server"}
    assert kvstrata.cpu_seconds.keys() == {"client", "engine", "worker"}


def test_a_round_that_is_cut_off_is_measured_again_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "Member", Fake)
    monkeypatch.setattr(session, "measure_rates", lambda *_: {})
    options = Options("quick", ("chat",), ("none", "kvstrata"), rounds=2)
    folder = RunFolder(tmp_path / "run", options)
    end = Fake.end

    def cut_in_the_second_round(member: Fake) -> Ran:
        ran = end(member)
        if len(folder.measured()) == 2 and len(ran.answers) > 1:
            raise KeyboardInterrupt
        return ran

    monkeypatch.setattr(Fake, "end", cut_in_the_second_round)
    with pytest.raises(KeyboardInterrupt):
        Session(folder, options, MODEL, MACHINE, BEGUN, tmp_path, Silent()).go()
    kept = folder.measured()
    assert {row.round for row in kept} == {0}
    monkeypatch.setattr(Fake, "end", end)
    Session(folder, options, MODEL, MACHINE, BEGUN, tmp_path, Silent()).go()
    assert folder.measured()[: len(kept)] == kept
    assert [(row.round, row.contender) for row in folder.measured()[len(kept) :]] == [
        (1, "kvstrata"),
        (1, "none"),
    ]


def test_more_rounds_are_measured_beside_those_that_there_are(
    run: RunFolder, tmp_path: Path
) -> None:
    kept = (run.path / "measured.jsonl").read_bytes()
    Session(run, three(3), MODEL, MACHINE, BEGUN, tmp_path, Silent()).go()
    grown = (run.path / "measured.jsonl").read_bytes()
    assert grown.startswith(kept)
    assert {row.round for row in run.measured()} == {0, 1, 2}


def test_the_tables_name_every_command_that_has_measured_something(
    run: RunFolder, tmp_path: Path
) -> None:
    shown = Begun("2026-11-26 09:00 UTC", "kvstrata bench --rounds 2 --json", "")
    Session(run, three(2), MODEL, MACHINE, shown, tmp_path, Silent()).go()
    more = Begun("2026-11-26 10:00 UTC", "kvstrata bench --rounds 3", "")
    Session(run, three(3), MODEL, MACHINE, more, tmp_path, Silent()).go()
    assert markdown(run).splitlines()[:3] == [
        "    kvstrata bench --rounds 2    # 2026-11-25 09:00 UTC, commit abc1234",
        "    kvstrata bench --rounds 3    # 2026-11-26 10:00 UTC",
        "",
    ]


class Restarted(Fake):
    """Answers 0.25 s after a request is due, and is away for 5 s when it is restarted."""

    now = 0.0
    cuts: ClassVar[list[float]] = []

    def restart(self) -> None:
        self.now += 5.0

    def usage(self) -> dict[Role, Usage]:
        return dict.fromkeys(ROLES, Usage(self.now, 1))

    def end(self) -> Ran:
        cut = self._traffic.cut_seconds
        due = [talk.due_seconds or 0.0 for talk in self._traffic.conversations]
        came = [max(0.0, at) + 0.25 for at in due]
        seconds = max(came) if cut is None else cut
        self.now += seconds
        self.cuts.extend([] if cut is None else [cut])
        return Ran(
            seconds,
            [
                Answer(number, 0, 9, 0, then - at, [], 1)
                for number, (at, then) in enumerate(zip(due, came, strict=True))
                if then <= seconds
            ],
        )


def test_what_a_restart_cuts_off_is_asked_again_and_counts_from_when_it_was_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = Restarted("none", session.deployment("none", MODEL, tmp_path, 2050, 1), {})
    monkeypatch.setattr(restarts, "time", SimpleNamespace(perf_counter=lambda: member.now))
    answered, under_way, missed, later = 0.0, 0.9, 1.05, 30.0
    talks = [
        Conversation([Turn([1], 1)], due_seconds)
        for due_seconds in (answered, under_way, missed, later)
    ]
    meter = Meter(member)  # type: ignore[arg-type]
    ran = run_with_restart(member, Traffic(talks, users=0), 1.0, meter)  # type: ignore[arg-type]
    assert [answer.conversation for answer in ran.answers] == [0, 1, 2, 3]
    firsts = [answer.first_token_seconds for answer in ran.answers]
    assert firsts == pytest.approx([0.25, 5.35, 5.2, 0.25])  # the engine is back at 6 s
    assert ran.seconds == pytest.approx(30.25)
    assert ran.silent_seconds == pytest.approx(5.25)


def test_an_engine_is_restarted_in_the_middle_of_the_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "Member", Restarted)
    monkeypatch.setattr(Restarted, "cuts", [])
    monkeypatch.setattr(session, "measure_rates", lambda *_: {})
    options = Options("quick", ("restart",), ("none",), rounds=1)
    folder = RunFolder(tmp_path / "run", options)
    Session(folder, options, MODEL, MACHINE, BEGUN, tmp_path, Silent()).go()
    results = results_of(folder)
    assert results.steps("restart") == [
        "before the restart",
        "restart in the traffic",
        "after the restart",
    ]
    (before,) = results.figures("restart", "before the restart")
    (figures,) = results.figures("restart", "restart in the traffic")
    assert (before.silent_most, figures.failures) == (None, 0)
    # Before and after the restart, which took five seconds more.
    (cut,) = Restarted.cuts
    (row,) = [row for row in folder.measured() if row.name == "restart in the traffic"]
    assert row.used["engine"].cpu_seconds == pytest.approx(cut + row.seconds, abs=0.1)
    assert (figures.memory_bytes, figures.moved_bytes) == (4, {})
    assert "silent s" in markdown(folder)


def test_a_run_with_no_restart_has_no_column_of_silence(run: RunFolder) -> None:
    assert "silent s" not in markdown(run)
