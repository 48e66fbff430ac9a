import json
import os
import signal
import sys
from collections.abc import Generator, Iterator
from io import StringIO
from pathlib import Path
from typing import Final

import pytest
from rich.console import Console
from tests.cli.processes import until
from typer.testing import CliRunner

from kvstrata.cli import demo as demo_module
from kvstrata.cli import demo_process
from kvstrata.cli.demo_engine import Answered, EngineOrders, Event, Phase, PhaseEnded, Ready
from kvstrata.cli.demo_plot import draw
from kvstrata.cli.demo_process import EngineFailed, events_of
from kvstrata.cli.demo_report import Measured
from kvstrata.cli.main import app

SECONDS: dict[Phase, float] = {
    "plain": 1.0,
    "cold": 1.0,
    "device": 0.01,
    "host": 0.05,
    "disk": 0.1,
}
REUSED: dict[Phase, int] = {"plain": 0, "cold": 0, "device": 2048, "host": 2048, "disk": 2048}
FOUND: dict[Phase, dict[str, int]] = {
    "plain": {},
    "cold": {"host": 0, "disk": 0},
    "device": {"host": 0, "disk": 0},
    "host": {"host": 96, "disk": 0},
    "disk": {"host": 0, "disk": 96},
}


def events(phases: list[Phase], prompts: int = 3) -> Iterator[Event]:
    """What engines report when all is well; the warm-up is slow."""
    for phase in phases:
        for number in range(prompts):
            seconds = SECONDS[phase] * (9 if number == 0 else 1)
            yield Answered(phase, number, seconds, REUSED[phase], [number, 7, 8])
        yield PhaseEnded(phase, dict(FOUND[phase]))


@pytest.fixture
def measured() -> Measured:
    collected = Measured(prompt_tokens=2049, tokens_per_block=64)
    for event in events(list(SECONDS)):
        assert isinstance(event, Answered | PhaseEnded)
        collected.add(event)
    return collected


def rendered(measured: Measured) -> str:
    console = Console(width=80, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(measured.table())
    return capture.get()


# --- verdict and table -----------------------------------------------------------------------


def test_all_well(measured: Measured) -> None:
    assert measured.faults() == []


def test_the_table_shows_medians_without_the_warm_up_in_80_columns(measured: Measured) -> None:
    title, *rows = [line.rstrip() for line in rendered(measured).splitlines()]
    assert title.split("  ")[-1] == "tokens"
    assert [" ".join(row.split()) for row in rows] == [
        "cold, without KVStrata 1000.0 ms 0 of 2,049 equal",
        "cold 1000.0 ms 0 of 2,049 equal",
        "device hit 10.0 ms 100.0x 2,048 of 2,049 equal",
        "host hit 50.0 ms 20.0x 2,048 of 2,049 equal",
        "disk hit, after a restart 100.0 ms 10.0x 2,048 of 2,049 equal",
    ]


def test_speed_ups_are_relative_to_all_cold_prompts(measured: Measured) -> None:
    """The first engine met a slow machine."""
    for answer in measured.answers["plain"]:
        answer.first_token_seconds *= 2
    measured.answers["cold"][1].first_token_seconds = 1.2
    assert measured.cold_seconds == pytest.approx((1.2 + 2.0) / 2)
    ratios = [each["speed_up"] for each in measured.as_plain()["phases"]]
    assert ratios == pytest.approx([0.8, 1.6 / 1.1, 160, 32, 16])


@pytest.mark.parametrize("phase", ["plain", "cold"])
@pytest.mark.parametrize(("factor", "is_steady"), [(1.2, True), (1.3, False)])
def test_a_machine_is_steady_if_both_engines_take_about_as_long_for_cold_prompts(
    measured: Measured, phase: Phase, factor: float, is_steady: bool
) -> None:
    for answer in measured.answers[phase]:
        answer.first_token_seconds *= factor
    assert measured.is_steady == is_steady
    assert measured.faults() == []


def test_one_different_token_is_a_fault(measured: Measured) -> None:
    measured.answers["host"][2].tokens = [2, 7, 9]
    assert measured.faults() == [
        "host hit: the tokens of 1 of 3 prompts differ from those without KVStrata"
    ]
    assert "2 of 3" in rendered(measured)


@pytest.mark.parametrize("phase", ["device", "host", "disk"])
def test_a_hit_of_too_few_tokens_is_a_fault(measured: Measured, phase: Phase) -> None:
    measured.answers[phase][1].reused_tokens = 1984
    (fault,) = measured.faults()
    assert fault.endswith("prompt 1 reused 1984 of 2048 tokens")


def test_a_cold_run_that_is_not_cold_is_a_fault(measured: Measured) -> None:
    measured.answers["cold"][0].reused_tokens = 64
    (fault,) = measured.faults()
    assert fault == "cold: prompt 0 reused 64 tokens and should have reused none"


@pytest.mark.parametrize(
    ("phase", "found", "where"),
    [
        ("host", {"host": 0, "disk": 96}, "disk"),
        ("disk", {"host": 1, "disk": 95}, "disk, host"),
        ("disk", {"host": 0, "disk": 0}, "nowhere"),
    ],
)
def test_a_hit_of_another_tier_is_a_fault(
    measured: Measured, phase: Phase, found: dict[str, int], where: str
) -> None:
    measured.found_blocks[phase] = found
    (fault,) = measured.faults()
    assert fault.endswith(f"blocks were found in: {where}")


def test_the_plot_is_written(measured: Measured, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "demo.png", "title", measured.series())
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


# --- the command -----------------------------------------------------------------------------


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[EngineOrders]:
    """Engines that report what they should, without vLLM; the orders that they were given."""
    given: list[EngineOrders] = []

    def play(orders: EngineOrders, log: Path) -> Generator[Event]:
        given.append(orders)
        log.write_text("")
        yield Ready("cpu")
        yield from events(orders.phases, len(orders.prompts))

    monkeypatch.setattr(demo_process, "events_of", play)
    monkeypatch.setattr(demo_module, "_check_environment", lambda: None)
    return given


def test_three_engines_run_and_the_last_two_share_a_disk(
    engines: list[EngineOrders], tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["demo", "--keep", str(tmp_path / "kept"), "--prompts", "2"])
    assert result.exit_code == 0, result.output
    assert "every hit has hit and no token differs" in result.stdout
    assert [orders.phases for orders in engines] == [
        ["plain"],
        ["cold", "device", "host"],
        ["disk"],
    ]
    assert [orders.tiers for orders in engines] == [
        None,
        *[f"host:512MiB | disk:{tmp_path}/kept/disk:1GiB"] * 2,
    ]
    assert len({orders.engine_id for orders in engines}) == 3
    for orders in engines:
        assert orders.prompts == engines[0].prompts
        assert [len(prompt) for prompt in orders.prompts] == [2049] * 3
    assert sorted(os.listdir(tmp_path / "kept")) == [f"engine-{n}.log" for n in (1, 2, 3)]


ENDED: Final = [
    "engine 1, without KVStrata: cold 1000 ms",
    "engine 2, with KVStrata: cold 1000 ms, device hit 10 ms, host hit 50 ms",
    "engine 3, restarted: disk hit 100 ms",
]


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize("is_terminal", [False, True])
def test_medians_of_an_engine_are_shown_before_the_next_one_starts(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = StringIO()
    before: list[list[str]] = []
    play = demo_process.events_of

    def watched(orders: EngineOrders, log: Path) -> Generator[Event]:
        before.append([line for line in ENDED if line in shown.getvalue()])
        return play(orders, log)

    monkeypatch.setattr(demo_process, "events_of", watched)
    console = Console(file=shown, force_terminal=is_terminal, width=60)
    demo_module._measure(tmp_path, 2, console)
    assert before == [[], ENDED[:1], ENDED[:2]]
    assert ENDED[2] in shown.getvalue()


@pytest.mark.usefixtures("engines")
def test_without_keep_the_last_line_says_how_to_get_a_model_to_serve(tmp_path: Path) -> None:
    remedy = "kvstrata demo --keep DIR leaves the model, for kvstrata serve"
    bare = CliRunner().invoke(app, ["demo"])
    assert bare.stderr.splitlines()[-4:] == [
        ENDED[1],
        "engine 3, restarted …",
        ENDED[2],
        remedy,
    ]
    kept = CliRunner().invoke(app, ["demo", "--keep", str(tmp_path)])
    assert kept.stderr.splitlines()[-1] == f"all of it is left in {tmp_path}"
    assert remedy not in CliRunner().invoke(app, ["demo", "--json"]).output


@pytest.mark.usefixtures("engines")
def test_cold_prompts_of_two_speeds_say_that_figures_are_not_to_be_compared_closely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "something else probably uses this machine"
    assert said not in CliRunner().invoke(app, ["demo"]).stdout
    monkeypatch.setitem(SECONDS, "cold", 2.0)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0
    assert said in result.stdout


@pytest.mark.usefixtures("engines")
def test_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = CliRunner().invoke(app, ["demo", "--json", "--prompts", "2"])
    shown = json.loads(result.stdout)
    assert [each["phase"] for each in shown["phases"]] == list(SECONDS)
    assert shown["phases"][3]["speed_up"] == pytest.approx(20)
    assert shown["faults"] == []
    assert os.listdir(tmp_path) == []  # nothing is left behind


@pytest.mark.usefixtures("engines")
def test_a_fault_ends_the_demo_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REUSED, "disk", 0)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "wrong disk hit, after a restart: prompt 0 reused 0 of 2048 tokens" in result.stdout


@pytest.mark.usefixtures("engines")
def test_an_engine_that_ends_early_ends_the_demo_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_process, "events_of", lambda *_: (each for each in [Ready("cpu")]))
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "an engine has ended before all prompts were answered" in result.stderr


def test_a_demo_that_is_told_to_end_ends_its_engine_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def events(orders: EngineOrders, log: Path) -> Iterator[Event]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            yield Ready("cpu")
        finally:
            ended.append(orders)

    monkeypatch.setattr(demo_process, "events_of", events)
    monkeypatch.setattr(demo_module, "_check_environment", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 130
    assert len(ended) == 1
    assert os.listdir(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.usefixtures("engines")
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").write_text("")
    full = CliRunner().invoke(app, ["demo", "--keep", str(tmp_path)])
    assert (full.exit_code, "it holds 'old' already" in full.stderr) == (2, True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    bare = CliRunner().invoke(app, ["demo", "--plot", "a.png"])
    assert bare.exit_code == 2
    assert "hint: pip install 'kvstrata[plot]'" in bare.stderr


def test_without_vllm_the_remedy_is_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "hint: pip install 'kvstrata[vllm]'" in result.stderr


# --- the process of an engine ----------------------------------------------------------------

ORDERS = EngineOrders("model", [[1]], 1, ["plain"], "id")


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that runs in place of Python with an engine."""
    program = tmp_path / "child"
    monkeypatch.setattr("sys.executable", str(program))
    return program


def write(program: Path, *lines: str) -> None:
    program.write_text(f"#!{sys.base_prefix}/bin/python3\n" + "\n".join(lines))
    program.chmod(0o755)


def test_events_arrive_and_messages_go_to_the_log(child: Path, tmp_path: Path) -> None:
    write(
        child,
        "import sys, json",
        "orders = json.loads(sys.stdin.readline())",
        "print('noise', file=sys.stderr)",
        """print('{"type":"Ready","device":"' + orders["model"] + '"}')""",
    )
    assert list(events_of(ORDERS, tmp_path / "log")) == [Ready("model")]
    assert (tmp_path / "log").read_text() == "noise\n"


def test_a_failed_engine_shows_the_end_of_its_messages(child: Path, tmp_path: Path) -> None:
    write(child, "import sys", "print('no memory', file=sys.stderr)", "sys.exit(3)")
    with pytest.raises(EngineFailed, match="exit code 3") as raised:
        list(events_of(ORDERS, tmp_path / "log"))
    assert "| no memory" in str(raised.value)


def test_a_hanging_engine_is_given_up(
    child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_process, "_SILENCE_SECONDS", 0.2)
    write(child, "import time", "time.sleep(60)  # longer than the test waits")
    with pytest.raises(EngineFailed, match="has not answered"):
        list(events_of(ORDERS, tmp_path / "log"))


def test_an_engine_and_its_children_end_with_the_demo(child: Path, tmp_path: Path) -> None:
    write(
        child,
        "import os, subprocess, sys, time",
        "worker = subprocess.Popen(['sleep', '60'])",
        """print('{"type":"Ready","device":"%d"}' % worker.pid, flush=True)""",
        "time.sleep(60)  # longer than the test waits",
    )
    reported = events_of(ORDERS, tmp_path / "log")
    ready = next(reported)
    assert isinstance(ready, Ready)
    worker = int(ready.device)
    reported.close()
    until(lambda: has_ended(worker), 10, tmp_path / "log")


def has_ended(pid: int) -> bool:
    """Whether process *pid* is gone, or waits only for whoever has inherited it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in {"Z", "X"}


def test_settings_of_the_user_do_not_reach_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_TIERS", "host:1GiB")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    environment = demo_process._environment()
    assert "KVSTRATA_TIERS" not in environment
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["HF_HUB_OFFLINE"] == "1"
