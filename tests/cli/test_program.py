import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.cli.processes import environment, kvstrata
from typer.testing import CliRunner

from kvstrata import __version__
from kvstrata.cli.main import app
from kvstrata.replay.formats import sample_path

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


def _words(shown: str) -> str:
    """*shown* without frames, backticks and line breaks."""
    return " ".join(re.sub("[│╭╮╰╯─`]", " ", shown).split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_word_of_its_text_and_every_value_once_in_brackets(name: str) -> None:
    command = typer.main.get_group(app).commands[name]
    shown = _words(CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "300"}).stdout)
    for part in inspect.cleandoc(command.help or "").split("\n\n"):
        assert _words(part) in shown
    for parameter in command.params:
        if not getattr(parameter, "hidden", False) and parameter.metavar:
            assert _words(parameter.metavar) in shown
    assert "[[" not in shown
    assert "]]" not in shown
    usage = shown.partition("Usage: ")[2].partition(" Exits ")[0].partition(". ")[0].lower()
    for parameter in command.params:
        if parameter.param_type_name == "argument" and not parameter.required:
            assert f"[{parameter.name}]" in usage


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_the_command_exits_with(name: str) -> None:
    command = typer.main.get_group(app).commands[name]
    assert "Exits with" in (command.help or "")


@pytest.mark.parametrize("name", [each for each in COMMANDS if each != "serve"])
def test_an_unknown_option_ends_a_command_with_2(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--no-such-option"])
    assert result.exit_code == 2
    assert "No such option" in result.stderr


def test_a_value_in_brackets_is_shown_as_it_was_given(tmp_path: Path) -> None:
    trace = tmp_path / "[bold]a:cat:.jsonl.gz"
    trace.write_bytes(sample_path().read_bytes())
    result = CliRunner().invoke(app, ["replay", str(trace), "--host", "64GiB"])
    assert "[bold]a:cat:.jsonl.gz" in result.stdout
    file = tmp_path / "[red].yml"
    for command in (["doctor", "--config", str(file)], ["serve", "m", "--config", str(file)]):
        result = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
        assert str(file) in result.output


@pytest.mark.parametrize("url", ["[red]", "valkey://u:secret@cache", "bucket"])
def test_gc_of_what_is_no_object_store_says_what_is(url: str) -> None:
    result = CliRunner().invoke(app, ["gc", url, "--keep", "1GiB"])
    assert result.exit_code == 2
    assert "only object stores are collected\n  hint: give s3://, gs:// or az://" in result.stderr
    assert "secret" not in result.stderr


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
