"""`kvstrata bench`: what it refuses, what it prints of a run, and a run in a real vLLM."""

import json
import os
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rich.progress
from tests.cli.processes import kvstrata
from typer.testing import CliRunner

from kvstrata.bench import services
from kvstrata.bench.processes import ROLES, Usage
from kvstrata.bench.profiles import PROFILES
from kvstrata.bench.record import About, Machine, Measured, Options, Rates, RunFolder
from kvstrata.bench.session import Session
from kvstrata.bench.traffic import Answer
from kvstrata.cli.main import app


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    return result.stderr


@pytest.mark.parametrize("option", ["--profile", "--workload", "--contender"])
def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path, option: str) -> None:
    message = refused(option, "nonsense", "--output", str(tmp_path))
    assert f"{option} nonsense" in message
    assert "one of " in message


@pytest.mark.parametrize("name", ["lmcache", "lmcache-disk", "lmcache-remote"])
def test_lmcache_is_not_measured_where_it_is_not(tmp_path: Path, name: str) -> None:
    message = refused("--contender", name, "--output", str(tmp_path / "run"))
    assert f"--contender {name}: it needs " in message
    assert "--lmcache DIR" in message
    message = refused("--lmcache", str(tmp_path), "--output", str(tmp_path / "run"))
    assert f"--lmcache {tmp_path}: no LMCache is installed there" in message
    assert not (tmp_path / "run").exists()


def test_a_workload_that_no_contender_takes_part_in_is_refused(tmp_path: Path) -> None:
    arguments = ("--workload", "documents", "--contender", "example", "--output", str(tmp_path))
    assert "none of the contenders takes part" in refused(*arguments)


@pytest.mark.parametrize("name", ["kvstrata-remote", "lmcache-remote"])
def test_valkey_is_not_measured_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(services, "find_valkey", lambda: None)
    message = refused("--contender", name, "--output", str(tmp_path / "run"))
    assert f"--contender {name}: it needs valkey-server or redis-server" in message


def test_a_file_is_no_output(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert str(file) in refused("--contender", "none", "--output", str(file))


def finished_run(path: Path, *, as_meant: bool) -> list[str]:
    """Of one round in which KVStrata took a quarter of the time; the options to see it again."""
    options = Options("quick", ("single", "chat"), ("none", "kvstrata"), rounds=1)
    folder = RunFolder(path, options)
    versions = {"kvstrata": "0"}
    machine = Machine("a processor", 2, 1 << 34, "Linux", versions, "cpu", "0,1", "ext4")
    folder.describe(About(machine, "a model", 0.5, "none"))
    for workload, name in (("single", "host hit, 1026 tokens"), ("chat", "chat")):
        folder.append(Rates(workload, 0, {"host": 1e9}))
        for contender, seconds in (("none", 1.0), ("kvstrata", 0.25)):
            answer = Answer(0, 0, 1026, 1024, seconds, [0.01], 2)
            folder.append(
                Measured(
                    workload,
                    0,
                    0,
                    name,
                    contender,
                    seconds,
                    [answer],
                    {"client": Usage(0.1), "engine": Usage(0.5, 1 << 30), "server": Usage(0.01)},
                    {"host read": 1 << 20},
                    "host" if workload == "single" else None,
                    as_meant or workload == "chat",
                )
            )
        folder.end_round(workload, 0)
    return [
        *("bench", "--output", str(path), "--rounds", "1", "--workload", "chat"),
        *("--workload", "single", "--contender", "none", "--contender", "kvstrata"),
    ]


def test_a_run_that_is_done_is_shown_and_drawn_again(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, finished_run(tmp_path / "run", as_meant=True))
    assert result.exit_code == 0, result.output
    table = [line for line in result.stdout.splitlines() if line.startswith("| chat | KVStrata")]
    assert table[0].split(" | ")[2:] == ["1", "250.0", "250.0", "250.0", "250.0", "0.25 |"]
    assert "host read 1.0 MiB" in table[1]
    assert (tmp_path / "run" / "report.md").read_text() in result.stdout
    for drawing in ("chat.png", "single.png"):
        assert (tmp_path / "run" / drawing).read_bytes().startswith(b"\x89PNG")


def test_json_has_every_figure(tmp_path: Path) -> None:
    arguments = finished_run(tmp_path / "run", as_meant=True)
    result = CliRunner().invoke(app, [*arguments, "--json"])
    plain = json.loads(result.stdout)
    assert plain == json.loads((tmp_path / "run" / "report.json").read_text())
    (_, ours) = plain["workloads"]["chat"]["chat"]
    assert (ours["contender"], ours["to_cold"]) == ("kvstrata", 0.25)
    assert plain["about"]["machine"]["cores"] == 2


def test_a_hit_that_was_none_is_a_failure(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, finished_run(tmp_path / "run", as_meant=False))
    assert result.exit_code == 1
    assert "were not the hit or miss that they should be" in result.stdout


def test_a_run_that_is_told_to_end_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(session: Session) -> None:
        assert session.scratch.is_dir()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)  # it never is over

    monkeypatch.setattr(Session, "go", go)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = CliRunner().invoke(app, ["bench", "--output", str(tmp_path / "run")])
    assert result.exit_code == 130
    assert list(tmp_path.glob("kvstrata-bench-*")) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_the_bar_moves_within_rounds_and_without_a_terminal_each_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []

    def go(session: Session) -> None:
        session.progress.say("chat, round 2: chat")
        session.progress.advance(0.25)
        session.progress.end_round()

    arguments = finished_run(tmp_path / "run", as_meant=True)
    monkeypatch.setattr(Session, "go", go)
    monkeypatch.setattr(rich.progress.Progress, "advance", lambda *given: shares.append(given[-1]))
    arguments[arguments.index("--rounds") + 1] = "2"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert shares == [0.25]
    assert "chat, round 2: chat: 3 of 4 rounds\n" in result.stderr


def test_a_run_goes_on_in_whatever_order_its_contenders_are_named(tmp_path: Path) -> None:
    *arguments, _, one, _, other = finished_run(tmp_path / "run", as_meant=True)
    named = [*("--contender", other), *("--contender", one), *("--contender", one)]
    result = CliRunner().invoke(app, [*arguments, *named])
    assert result.exit_code == 0, result.stderr


def test_a_run_of_another_machine_is_shown_and_not_gone_on_with(tmp_path: Path) -> None:
    arguments = finished_run(tmp_path / "run", as_meant=True)
    arguments[arguments.index("--rounds") + 1] = "2"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "it holds a run of another machine: processor was 'a processor' and is" in result.stderr


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.alone
def test_hits_of_real_engines(tmp_path: Path) -> None:
    """Ours and a peer through the steps of single prompts; then nothing is left to do."""
    arguments = [
        *("bench", "--output", str(tmp_path / "run"), "--rounds", "1", "--json"),
        *("--workload", "single", "--contender", "kvstrata", "--contender", "example"),
    ]
    first = kvstrata(*arguments, timeout_seconds=500)
    assert first.returncode == 0, first.stdout + first.stderr
    steps = json.loads(first.stdout)["workloads"]["single"]
    hits = ("miss", "device hit", "host hit", "disk hit")
    assert list(steps) == [f"{hit}, 2050 tokens" for hit in hits]
    for name, measured in steps.items():
        whole = 0.0 if name.startswith("miss") else 1.0
        for figures in measured:
            assert figures["reused_share"] == pytest.approx(whole, abs=0.01)
            assert figures["cpu_seconds"]["worker"] > figures["cpu_seconds"]["engine"]
            assert figures["memory_bytes"] > 1 << 28
    (host,) = steps["host hit, 2050 tokens"]
    assert host["moved_bytes"]["host read"] == 2048 * 6144
    miss, written = steps["miss, 2050 tokens"]
    assert miss["moved_bytes"]["host write"] == 2048 * 6144
    assert written["moved_bytes"]["disk write"] == pytest.approx(2048 * 6144, rel=0.01)
    (disk,) = steps["disk hit, 2050 tokens"]
    assert disk["moved_bytes"] == {"disk read": written["moved_bytes"]["disk write"]}
    kept = (tmp_path / "run" / "measured.jsonl").read_bytes()
    again = kvstrata(*arguments)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "run" / "measured.jsonl").read_bytes() == kept
    assert json.loads(again.stdout) == json.loads(first.stdout)


Steps = dict[str, dict[str, Any]]


def of_short_traffic(workload: str, output: Path) -> Steps:
    """The figures of one engine with an attached server, by step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROFILES, "tiny", replace(PROFILES["quick"], seconds=3.0))
        arguments = [
            *("bench", "--profile", "tiny", "--output", str(output), "--rounds", "1", "--json"),
            *("--workload", workload, "--contender", "kvstrata-attached"),
        ]
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    steps = json.loads(result.stdout)["workloads"][workload]
    return {name: figures for name, (figures,) in steps.items()}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.alone
def test_a_real_engine_is_restarted_in_the_traffic_and_every_request_answered(
    tmp_path: Path,
) -> None:
    steps = of_short_traffic("restart", tmp_path / "run")
    assert list(steps) == ["before the restart", "restart in the traffic", "after the restart"]
    assert {figures["failures"] for figures in steps.values()} == {0}
    restarted = steps["restart in the traffic"]
    assert restarted["silent_most"] > 0
    assert restarted["first_token_most"] > restarted["silent_most"] / 2  # somebody has waited
    assert steps["after the restart"]["reused_share"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.alone
def test_the_server_of_a_real_engine_is_killed_and_every_request_answered(tmp_path: Path) -> None:
    steps = of_short_traffic("killed", tmp_path / "run")
    assert list(steps) == ["killed", "after it"]
    assert {figures["failures"] for figures in steps.values()} == {0}
    assert steps["killed"]["cpu_seconds"].keys() == set(ROLES)  # the server's up to its end
    assert steps["killed"]["moved_bytes"] == {}
