"""The units: what systemd says of them, and what it cannot know."""

import re
import sys
from pathlib import Path

import pytest
from tests.deploy.files import DEPLOY, assignments, one, run, tool, unit

from kvstrata.core.load import load_config

FOLDER = DEPLOY / "systemd"
SERVER, ENGINE = unit("kvstrata@.service"), unit("vllm@.service")
MOST_EXPOSED = 20  # of 100; the server's unit has 15


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units for one model, with a program that is there."""
    program = tmp_path / "kvstrata"
    program.symlink_to(sys.executable)
    for name in ("kvstrata@.service", "vllm@.service"):
        text = (FOLDER / name).read_text()
        assert "/opt/kvstrata/bin/kvstrata" in text
        (tmp_path / name).write_text(text.replace("/opt/kvstrata/bin/kvstrata", str(program)))
    return tmp_path


def test_systemd_understands_every_line(installed: Path) -> None:
    names = ("kvstrata@llama.service", "vllm@llama.service")
    done = run(tool("systemd-analyze"), "verify", *(f"./{name}" for name in names), cwd=installed)
    ours = [
        line for line in done.stderr.splitlines() if line.startswith((*names, "./", str(installed)))
    ]
    assert (done.returncode, ours) == (0, []), done.stderr


def test_systemd_finds_the_server_hardened(installed: Path) -> None:
    done = run(
        tool("systemd-analyze"),
        "security",
        "--offline=true",
        f"--threshold={MOST_EXPOSED}",
        "--no-pager",
        "./kvstrata@.service",
        cwd=installed,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_the_user_can_be_made() -> None:
    done = run(tool("systemd-sysusers"), "--dry-run", str(FOLDER / "kvstrata.sysusers.conf"))
    assert done.returncode == 0, done.stderr
    made = (FOLDER / "kvstrata.sysusers.conf").read_text()
    assert re.search(r"^u kvstrata ", made, re.MULTILINE)
    assert one(SERVER, "User") == one(ENGINE, "User") == "kvstrata"


def test_paths_are_directories_that_systemd_makes_for_the_server() -> None:
    made = {
        f"/run/{one(SERVER, 'RuntimeDirectory')}": one(SERVER, "RuntimeDirectoryMode"),
        f"/var/cache/{one(SERVER, 'CacheDirectory')}": one(SERVER, "CacheDirectoryMode"),
        f"/var/log/{one(SERVER, 'LogsDirectory')}": one(SERVER, "LogsDirectoryMode"),
    }
    assert set(made.values()) == {"0700"}
    config = load_config({"config_file": str(FOLDER / "llama.yaml")}, environ={})
    assert config.disk_tier is not None
    assert config.event_log is not None
    (socket,) = re.findall(r"--socket (\S+)", one(SERVER, "ExecStart"))
    used = {
        str(Path(socket).parent),
        str(config.disk_tier.paths[0]).replace("llama", "%i"),
        str(config.event_log.parent).replace("llama", "%i"),
    }
    assert used == set(made)


def test_the_server_has_time_to_write_what_only_memory_has() -> None:
    config = load_config({"config_file": str(FOLDER / "llama.yaml")}, environ={})
    assert config.drain_timeout_seconds + 15 <= int(one(SERVER, "TimeoutStopSec"))


def test_system_calls_that_the_server_makes_are_allowed() -> None:
    """As `strace` shows them for a server with host memory, a disk tier and a metrics port."""
    needed = {"memfd_create", "mbind", "madvise", "fallocate", "sendmsg", "preadv2", "setpriority"}
    allowed = members("@default")
    for line in (value for key, value in SERVER if key == "SystemCallFilter"):
        if line.startswith("~"):
            allowed -= members(line[1:]) - members("@default")
        else:
            allowed |= members(line)
    assert needed <= allowed
    assert "mount" not in allowed


def members(group: str) -> set[str]:
    shown = run(tool("systemd-analyze"), "--no-pager", "syscall-filter", group).stdout.splitlines()
    found: set[str] = set()
    for name in (line.strip() for line in shown[1:]):
        if name and not name.startswith("#"):
            found |= members(name) if name.startswith("@") else {name}
    return found


def test_the_variables_of_an_engine_are_those_of_its_unit() -> None:
    used = set(re.findall(r"\$\{?([A-Z]+)", one(ENGINE, "ExecStart")))
    assert used == assignments(FOLDER / "llama.env").keys()
