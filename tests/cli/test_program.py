import subprocess
import sys

import pytest
from tests.cli.processes import environment, kvstrata
from typer.testing import CliRunner

from kvstrata import __version__
from kvstrata.cli.main import app

COMMANDS = [
    "serve",
    "server",
    "stats",
    "inspect",
    "top",
    "page",
    "pin",
    "unpin",
    "clear",
    "drain",
    "warm",
    "doctor",
    "check",
    "gc",
    "replay",
    "make-trace",
    "demo",
    "bench",
]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert "--help" in result.stdout


def test_the_list_of_commands_is_complete() -> None:
    registered = [info.callback.__name__ for info in app.registered_commands if info.callback]
    assert [name.replace("_", "-") for name in registered] == COMMANDS


def test_version() -> None:
    result = kvstrata("--version")
    assert (result.returncode, result.stdout) == (0, f"kvstrata {__version__}\n")


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from kvstrata.cli.main import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'vllm', 'pydantic', 'numpy', 'prometheus_client', 'msgspec', 'yaml'}\n"
        "print('imported:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
        timeout=60,  # far more than help takes
    )
    assert done.stdout.endswith("imported: []\n")


def test_an_unknown_command_ends_with_2() -> None:
    result = CliRunner().invoke(app, ["serv"])
    assert result.exit_code == 2
    assert "serve" in result.stderr
