"""Every `kvstrata ...` of deploy/ and its settings are understood by the program itself."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.deploy.files import SETTINGS, CommandLine, command_lines, manifest
from typer.testing import CliRunner

from kvstrata.cli.main import app
from kvstrata.core.config import Config

LINES = command_lines()
OF_SERVERS = [line for line in LINES if line.arguments[0] == "server"]
OF_ENGINES = [line for line in LINES if line.arguments[0] == "serve"]


def settings_file(line: CommandLine, folder: Path) -> Path:
    """What the server of *line* reads; of Kubernetes what the ConfigMap becomes."""
    if line.settings is not None:
        return line.settings
    mounted = folder / "kvstrata.yaml"
    mounted.write_text(manifest("ConfigMap", "kvstrata")["data"]["kvstrata.yaml"])
    return mounted


def settings_of(line: CommandLine, folder: Path, patch: pytest.MonkeyPatch) -> Config:
    """What the program would run a server with. This machine need not be large enough for it."""
    given: list[Config] = []
    patch.setattr("kvstrata.server.main.run_server", lambda config, *_, **__: given.append(config))
    patch.setattr("kvstrata.cli.server.check_machine", lambda *_, **__: [])
    for name, value in line.environment.items():
        patch.setenv(name, value)
    file = settings_file(line, folder)
    arguments = [
        argument.replace(SETTINGS, str(file)).replace("/etc/kvstrata/llama.yaml", str(file))
        for argument in line.arguments
    ]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    (config,) = given
    return config


def test_servers_and_engines_of_each_kind_of_deployment_are_found() -> None:
    assert {line.where for line in LINES} == {
        "Dockerfile CMD",
        "Dockerfile HEALTHCHECK",
        "compose server",
        "compose engine",
        "kubernetes kvstrata-server",
        "kubernetes kvstrata-server readinessProbe",
        "kubernetes vllm",
        "systemd kvstrata@.service",
        "systemd vllm@.service",
    }


@pytest.mark.parametrize("line", LINES, ids=str)
def test_a_command_line_is_one_of_the_program(line: CommandLine) -> None:
    name, *rest = line.arguments
    command = typer.main.get_group(app).commands[name]
    command.make_context(name, rest)  # raises for what it does not know


@pytest.mark.parametrize("line", OF_SERVERS, ids=str)
def test_a_server_starts_with_the_settings_beside_it(
    line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings_of(line, tmp_path, monkeypatch)
    kinds = [tier.kind for tier in config.tiers]
    expected = {
        "Dockerfile CMD": ["host"],
        "compose server": ["host", "disk", "valkey"],
        "kubernetes kvstrata-server": ["host", "disk", "valkey"],
        "systemd kvstrata@.service": ["host", "disk"],
    }
    assert kinds == expected[line.where]
    assert (config.metrics is None) == (line.where == "Dockerfile CMD")


@pytest.mark.parametrize("line", OF_ENGINES, ids=str)
def test_an_engine_joins_the_server_and_leaves_its_memory_to_it(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in line.environment.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, [*line.arguments, "--dry-run"])
    assert result.exit_code == 0, result.stderr
    assert "will run without a cache until one does" in result.stderr  # there is no server here
    command = shlex.split(result.stdout)
    transfer = json.loads(command[-1])
    assert transfer["kv_load_failure_policy"] == "recompute"
    extra = transfer["kv_connector_extra_config"]
    assert extra["server"] == "attached"
    (server,) = (each for each in OF_SERVERS if each.where.split()[0] == line.where.split()[0])
    assert extra["socket"] in " ".join(server.arguments)
    assert line.environment["KVSTRATA_PREFAULT"] == "false"


def test_no_option_of_vllm_is_taken_for_a_mistyped_one_of_ours() -> None:
    program = (
        "import json\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = make_arg_parser(FlexibleArgumentParser())\n"
        "print(json.dumps([o for a in parser._actions for o in a.option_strings]))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    theirs = set(json.loads(done.stdout.splitlines()[-1])) - {"--kv-transfer-config"}
    assert len(theirs) > 300
    result = CliRunner().invoke(app, ["serve", "model", "--dry-run", "--", *theirs])
    assert result.exit_code == 0
    assert "did you mean" not in result.stderr


def test_options_that_go_to_vllm_are_options_of_vllm() -> None:
    asked = [
        ["--model", line.arguments[1], *(o for o in line.arguments[2:] if "attach" not in o)]
        for line in OF_ENGINES
    ]
    asked = [[o for o in options if not o.endswith(".sock")] for options in asked]
    program = (
        "import json, sys\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = make_arg_parser(FlexibleArgumentParser())\n"
        "print([parser.parse_args(each).port for each in json.loads(sys.argv[1])])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[8000, 8000, 8000]"
