"""Every code block is run, or checked against the program that it is for, or stands here with a reason.

Python is run by ``test_docs.py``, `kvstrata replay` too, which has to print what is shown.
"""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
import typer
import yaml
from tests.cli.processes import environment
from tests.cli.traffic import NAMESPACE, engine, prompt, save, serving
from tests.deploy.files import run, tool
from tests.docs.blocks import PAGES, ROOT, Block, Command, blocks, commands
from tests.remote.objects_engine import BUCKET, MotoEngine
from tests.remote.objects_engine import environment as s3_variables
from typer.testing import CliRunner

from kvstrata.cli.main import app
from kvstrata.core.load import load_config
from kvstrata.core.types import StoreKey
from kvstrata.storage.disk import DiskStore
from kvstrata.testing.samples import ONE, random_value
from kvstrata.testing.samples import key as sample_key

BLOCKS = list(blocks())
COMMANDS = list(commands())

LANGUAGES: Final = {
    "": "drawings, and a line of `/etc/fstab`: nothing looks at them",
    "console": "taken apart into commands; see below",
    "diff": "of vLLM's settings for UCM: both sides are given to vLLM",
    "json": "read as settings, or as fields of a request",
    "python": "run, each block in a process of its own",
    "text": "usage, grammar and formats, which nothing looks at; examples of `kvstrata` are parsed",
    "yaml": "read as settings, Prometheus's by `promtool`; LMCache's are not, as their page says",
}
"""What tests do with a block; the page has these, and those below, word by word."""
SERVED: Final = {"clear", "drain", "inspect", "stats", "top", "warm"}
ARGUMENTS_NOT_RUN: Final = {
    (
        "warm",
        "prompts.jsonl",
    ): "needs to know how a real engine hashes; tests/vllm/test_prompt_keys.py",
}
OURS: Final = {
    "bench": "parsed; takes minutes, started by `make commands`; `tests/cli/test_bench.py` has shorter ones",
    "check": "run, on the directories of a store",
    "demo": "parsed; takes minutes, started by `make commands`; `tests/cli/test_demo.py` has engines that only report",
    "doctor": "run, with settings that the machine can hold",
    "gc": "run, on a bucket",
    "page": "parsed; runs until it is stopped, started by `make commands`; `tests/page` starts one, too",
    "replay": "parsed; where what it prints is shown, it is run and has to print that, else `make commands` runs it",
    "serve": "asked what it would start, as if all its memory, disks and servers were there; started by `make commands`",
    "server": "its settings are read; it would run until it is stopped, started by `make commands`",
    "warm": "run, against a server; with prompts, which asks a real engine, by `make commands`",
} | dict.fromkeys(SERVED - {"warm"}, "run, against a server")
PROGRAMS: Final = {
    "chmod": "belongs to the line that it follows; run by `make commands`",
    "curl": "asks an engine, which `make commands` starts; `tests/cli/test_serve_http.py` asks one",
    "docker": "needs a daemon; `tests/deploy` checks the file",
    "grep": "filters what `curl` prints",
    "install": "writes to `/etc` and `/usr`; `tests/deploy` checks the files",
    "kubectl": "needs a cluster; `tests/deploy` checks the files",
    "make": "installs, tests or measures for minutes; the target has to be one of the Makefile",
    "mkdir": "makes a directory in `/run`",
    "openssl": "is not ours; run by `make commands`",
    "pip": "would change what is installed; what is in brackets has to be an extra; `make commands` has pip find all of it",
    "pytest": "would run tests within tests; the files have to be there",
    "python": "measures for minutes or asks an engine; the program has to be there and know the options; run by `make commands`",
    "sudo": "becomes another user; the command behind it is parsed",
    "systemctl": "needs a running systemd; `tests/deploy` checks the units",
    "systemd-sysusers": "makes users; `tests/deploy` has it look at the file",
    "vllm": "starts an engine, by `make commands`; vLLM parses the options, and the settings of the connector are read",
}
"""None of these is run by `make test`."""


def of(*programs: str) -> list[Command]:
    """Each once, however often a page shows it."""
    return list(dict.fromkeys(each for each in COMMANDS if each.words[0] in programs))


def test_every_block_is_of_a_kind_that_is_looked_at() -> None:
    assert {block.language for block in BLOCKS} == LANGUAGES.keys()
    assert len(BLOCKS) > 100


def test_every_command_is_one_that_is_looked_at() -> None:
    assert {command.words[0] for command in COMMANDS} == {"kvstrata", *PROGRAMS}
    assert {command.words[1] for command in of("kvstrata")} == OURS.keys()


def test_the_page_says_what_is_looked_at_and_how() -> None:
    page = (ROOT / "docs" / "benchmark-method.md").read_text(encoding="utf-8")
    section = page.partition("## What of these pages is tested\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?:`([\w -]+)`|none) \| (.*) \|$", section, re.MULTILINE)
    ours = {f"kvstrata {name}": what for name, what in OURS.items()}
    assert sorted(rows) == sorted([*LANGUAGES.items(), *ours.items(), *PROGRAMS.items()])


# --- kvstrata --------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [*of("kvstrata"), *of("sudo")], ids=str)
def test_a_command_is_one_of_the_program(command: Command) -> None:
    words = command.words[3:] if command.words[0] == "sudo" else command.words
    assert words[0].endswith("kvstrata")
    name, *rest = words[1:]
    typer.main.get_group(app).commands[name].make_context(name, rest)  # raises for what is unknown


def examples() -> Iterator[str]:
    """Command lines of the reference, which stand there without a prompt."""
    for block in BLOCKS:
        if block.language == "text" and block.text.startswith("kvstrata "):
            yield from (line for line in block.text.splitlines() if "[options]" not in line)


@pytest.mark.parametrize("line", list(examples()))
def test_an_example_of_the_reference_is_one_of_the_program(line: str) -> None:
    name, *rest = shlex.split(line)[1:]
    typer.main.get_group(app).commands[name].make_context(name, rest)  # raises for what is unknown


@pytest.fixture
def _large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has all the memory, disks, mounts and servers of the documentation."""
    monkeypatch.setattr("kvstrata.cli.serve.check_machine", lambda *_, **__: [])
    monkeypatch.setattr("kvstrata.cli.server.check_machine", lambda *_, **__: [])
    monkeypatch.setattr("kvstrata.server.main.run_server", lambda *_, **__: None)


@pytest.mark.usefixtures("_large_machine")
@pytest.mark.parametrize(
    "command", [c for c in of("kvstrata") if c.words[1] in {"serve", "server"}], ids=str
)
def test_settings_on_a_command_line_are_settings(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in command.environment:
        monkeypatch.setenv(name, value)
    arguments = list(command.words[1:])
    if arguments[0] == "serve":
        arguments.insert(2, "--dry-run")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr


def test_commands_of_operators_do_what_they_say_at_a_server(tmp_path: Path) -> None:
    """Each after an engine has saved a prompt; after the last one, `drain`, none could."""
    shown = [
        c for c in of("kvstrata") if c.words[1] in SERVED and c.words[1:] not in ARGUMENTS_NOT_RUN
    ]
    with serving(tmp_path, "--host-size", "4MiB") as path, engine(path) as client:
        for number, command in enumerate(sorted(shown, key=lambda each: each.words[1] == "drain")):
            keys = prompt(f"p{number}", 3)
            save(client, keys, "cmpl-7f3a")
            (tmp_path / "keys.txt").write_text("".join(f"{key.hex()}\n" for key in keys))
            words = [
                w.replace("0123456789abcdef0123456789abcdef", NAMESPACE.hex())
                for w in command.words
            ]
            done = subprocess.run(
                [sys.executable, "-m", *words, *once(words)],
                cwd=tmp_path,
                env=environment(KVSTRATA_SOCKET=str(path)),
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert done.returncode == 0, (words, done.stdout, done.stderr)
    assert {command.words[1] for command in shown} == SERVED


def once(words: list[str]) -> list[str]:
    return ["--once"] if words[1] == "top" else []


def test_doctor_finds_no_problem(tmp_path: Path) -> None:
    (command,) = (each for each in of("kvstrata") if each.words[1] == "doctor")
    file = tmp_path / command.words[-1]
    file.write_text(f"tiers: host:64MiB | disk:{tmp_path}/kv:64MiB\n")
    done = run(sys.executable, "-m", *command.words, cwd=tmp_path, environment=environment())
    assert done.returncode == 0, done.stdout
    assert "0 problems" in done.stdout


def test_check_finds_a_sound_store(tmp_path: Path) -> None:
    (command,) = (each for each in of("kvstrata") if each.words[1] == "check")
    directories = [tmp_path / word.removeprefix("/") for word in command.words[2:]]
    assert len(directories) == 2
    store = DiskStore(directories, block_bytes=4096, capacity_bytes=64 * 8192)
    keys, values = blocks_of(3)
    store.write(keys, [None] * 3, values)
    store.close()
    words = [*command.words[:2], *map(str, directories)]
    done = run(sys.executable, "-m", *words, cwd=tmp_path, environment=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("sound\n")


def test_gc_looks_through_a_bucket_and_keeps_what_is_young(tmp_path: Path) -> None:
    shown = [each for each in of("kvstrata") if each.words[1] == "gc"]
    engine = MotoEngine()
    engine.start(tmp_path)
    try:
        for command in shown:
            prefix = command.words[2].removeprefix("s3://").partition("/")[2]
            with (
                s3_variables(engine.credentials()),
                closing(
                    engine.open(block_bytes=4096, timeout_seconds=10.0, prefix=prefix)
                ) as store,
            ):
                keys, values = blocks_of(2)
                store.write(keys, [None] * 2, values)
                where = ["--endpoint", engine.endpoint(*engine.address()), "--region", "us-east-1"]
                words = ["gc", f"s3://{BUCKET}/{prefix}", *command.words[3:], *where]
                result = CliRunner().invoke(app, words)
                assert result.exit_code == 0, result.output
                assert "found 2 blocks" in result.output
                assert store.exists(keys) == [True, True]
    finally:
        engine.stop()
    assert {"--dry-run", "--snapshot"} <= {word for command in shown for word in command.words}


def blocks_of(count: int) -> tuple[list[StoreKey], list[memoryview]]:
    keys = [sample_key(number, ONE) for number in range(count)]
    return keys, [memoryview(random_value(number, 4096)) for number in range(count)]


# --- vLLM ------------------------------------------------------------------------------------


def transfer_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    for command in of("vllm"):
        words = list(command.words)
        if "--kv-transfer-config" in words:
            yield str(command), json.loads(words[words.index("--kv-transfer-config") + 1])
    for block in BLOCKS:
        if block.language == "json" and "kv_connector" in (found := json.loads(block.text)):
            yield str(block), found


def connectors(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    for child in config.get("kv_connector_extra_config", {}).get("connectors", ()):
        yield from connectors(child)


@pytest.mark.parametrize(
    "config", [pytest.param(config, id=name) for name, config in transfer_configs()]
)
def test_what_vllm_is_told_of_the_connector_is_understood(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (ucm,) = (block.text for block in BLOCKS if "ucm_connectors" in block.text)
    (tmp_path / "ucm.yaml").write_text(ucm)
    assert config["kv_load_failure_policy"] == "recompute"
    ours = {"KVStrataConnector", "BlendConnector", "DirectConnector"}
    for each in connectors(config):
        if each["kv_connector"] in ours:
            assert each["kv_load_failure_policy"] == "recompute"
            extra = dict(each.get("kv_connector_extra_config", {}))
            if "UCM_CONFIG_FILE" in extra:
                extra["UCM_CONFIG_FILE"] = str(tmp_path / "ucm.yaml")
            load_config(extra, environ={})
        else:
            assert each["kv_connector"] in {"MultiConnector", "NixlConnector"}


def test_options_of_vllm_are_options_of_vllm() -> None:
    asked = [["--model", *command.words[2:]] for command in of("vllm")]
    for command in of("kvstrata"):
        if command.words[1] == "serve":
            context = (
                typer.main.get_group(app)
                .commands["serve"]
                .make_context("serve", list(command.words[2:]))
            )
            asked.append(["--model", command.words[2], *context.args])
    program = (
        "import json, sys\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = make_arg_parser(FlexibleArgumentParser())\n"
        "for each in json.loads(sys.argv[1]):\n"
        "    parser.parse_args(each)\n"
    )
    done = run(sys.executable, "-c", program, json.dumps(asked))
    assert done.returncode == 0, done.stderr
    assert len(asked) > 20


# --- the repository's own programs --------------------------------------------------------------


@pytest.mark.parametrize("command", of("python"), ids=str)
def test_a_program_of_the_repository_has_the_options_that_are_shown(command: Command) -> None:
    first, *rest = command.words[1:]
    if first == "-m":
        found = importlib.util.find_spec(rest.pop(0))
        assert found is not None
        assert found.origin is not None
        folder = Path(found.origin).parent
    else:
        assert (ROOT / first).exists()
        folder = (ROOT / first).parent
    source = "".join(file.read_text() for file in folder.glob("*.py"))
    for option in (word for word in rest if word.startswith("--")):
        assert f'"{option}"' in source


@pytest.mark.parametrize("command", of("make"), ids=str)
def test_a_target_is_one_of_the_makefile(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in command.words[1:]:
        assert "=" in target or re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE)


def test_an_extra_is_one_of_the_package() -> None:
    """In commands, in sentences and in the hints of our messages."""
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    files = [*PAGES, *(ROOT / "src" / "kvstrata").rglob("*.py")]
    found = [
        (file.name, extra)
        for file in files
        for names in re.findall(r"(?:kvstrata|'\.)\[([\w,]+)\]", file.read_text(encoding="utf-8"))
        for extra in names.split(",")
    ]
    assert len(found) > 20
    assert [each for each in found if each[1] not in extras] == []


def test_pip_adds_an_extra_to_what_is_installed_and_asks_no_index_for_it() -> None:
    wanted = ["--dry-run", "--no-index", "--disable-pip-version-check", "kvstrata[page]"]
    done = run(sys.executable, "-m", "pip", "--isolated", "install", *wanted)
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout


@pytest.mark.parametrize("command", of("pytest"), ids=str)
def test_tests_that_are_shown_are_there(command: Command) -> None:
    assert (ROOT / command.words[1]).exists()


# --- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=str)
def test_a_yaml_block_is_understood(block: Block, tmp_path: Path) -> None:
    found = yaml.safe_load(block.text)
    file = tmp_path / "shown.yaml"
    file.write_text(block.text)
    if "scrape_configs" in found:
        done = run(tool("promtool"), "check", "config", str(file))
        assert done.returncode == 0, done.stdout + done.stderr
    elif "ucm_connectors" in found:
        load_config({"UCM_CONFIG_FILE": str(file)}, environ={})
    elif "max_local_cpu_size" in found:  # LMCache's, which is not read: the page says so
        assert "LMCache's settings are not read" in block.page.read_text()
    else:
        load_config({"config_file": str(file)}, environ={})


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "json"], ids=str)
def test_a_json_block_is_understood(block: Block, tmp_path: Path) -> None:
    found = json.loads(block.text)
    if "cpu_cache_gb" in found:
        file = tmp_path / "flexkv.json"
        file.write_text(block.text)
        load_config({}, environ={"FLEXKV_CONFIG_PATH": str(file)})
    elif "kv_transfer_params" in found:
        assert found["kv_transfer_params"].keys() <= {"blend", "kvstrata_wait_seconds"}
    else:
        assert "kv_connector" in found  # looked at above


def test_what_is_said_of_lmcache_means_the_same_here() -> None:
    (block,) = (b for b in BLOCKS if b.language == "yaml" and "max_local_cpu_size" in b.text)
    theirs = yaml.safe_load(block.text)
    (ours,) = (c for c in of("kvstrata") if c.page == block.page and c.words[1] == "serve")
    assert f"{theirs['max_local_cpu_size']}GB" in ours.words
    assert any(word.endswith(f":{theirs['max_local_disk_size']}GB") for word in ours.words)
    assert theirs["remote_url"].replace("redis://", "valkey://") in ours.words
