"""The files of deploy/, read as the programs that they are for read them."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
DEPLOY: Final = ROOT / "deploy"
UID: Final = 10001
SETTINGS: Final = "/etc/kvstrata/kvstrata.yaml"
COMPOSE_ENVIRONMENT: Final = {"MODEL": "some/model", "GRAFANA_PASSWORD": "secret"}


@dataclass(frozen=True)
class CommandLine:
    """A `kvstrata ...` that something in deploy/ runs, without the program's name."""

    where: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Path | None = None  # what lies at the path behind --config

    def __str__(self) -> str:
        return self.where


def tool(name: str) -> str:
    """Where the program *name* of the environment of the tests, or of the system, is."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which(name, path=folders)
    assert found is not None, f"{name} is missing: run `make servers`"
    return found


def run(
    *command: str, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@functools.cache
def compose(*more: str) -> dict[str, Any]:
    """The compose file, and *more* on top of it, as docker compose understands them: names filled in,
    paths absolute.
    """
    files = [f"--file={DEPLOY / 'compose' / name}" for name in ("compose.yaml", *more)]
    done = run(
        tool("docker-compose"),
        *files,
        "config",
        "--format=json",
        environment=COMPOSE_ENVIRONMENT,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def manifests() -> list[dict[str, Any]]:
    """Every Kubernetes object, in the order in which they are applied."""
    return [
        document
        for name in kustomization()["resources"]
        for document in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())
    ]


def kustomization() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(
        (DEPLOY / "kubernetes" / "kustomization.yaml").read_text()
    )
    return found


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = (
        each for each in manifests() if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for each in manifests():
        if each["kind"] in {"DaemonSet", "Deployment"}:
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def unit(name: str) -> list[tuple[str, str]]:
    """Keys and values of a systemd unit, in order; a key may be there several times."""
    lines = (DEPLOY / "systemd" / name).read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and line[0] not in "#;[")
    return [(key, value) for key, _, value in pairs]


def one(pairs: Sequence[tuple[str, str]], key: str) -> str:
    (value,) = (v for k, v in pairs if k == key)
    return value


def assignments(path: Path) -> dict[str, str]:
    """Of a file of environment variables."""
    lines = path.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def dockerfile() -> list[tuple[str, str]]:
    """Its instructions and what follows them, with lines joined."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [
        (word, rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in lines)
    ]


def command_lines() -> list[CommandLine]:
    return [*_of_dockerfile(), *_of_compose(), *_of_kubernetes(), *_of_systemd()]


def _of_dockerfile() -> Iterator[CommandLine]:
    entry: list[str] = []
    for word, rest in dockerfile():
        if word == "ENTRYPOINT":
            entry = json.loads(rest)
        elif word == "CMD" and entry == ["kvstrata"]:
            yield CommandLine("Dockerfile CMD", json.loads(rest))
        elif word == "HEALTHCHECK" and '"kvstrata"' in rest:
            check = json.loads(rest[rest.index("CMD") + 3 :])
            yield CommandLine("Dockerfile HEALTHCHECK", check[1:])


def _of_compose() -> Iterator[CommandLine]:
    """From the file itself: tests are found without any tool."""
    text = (DEPLOY / "compose" / "compose.yaml").read_text()
    for name, value in COMPOSE_ENVIRONMENT.items():
        text = re.sub(rf"\$\{{{name}[^}}]*\}}", value, text)
    services = yaml.safe_load(text)["services"]
    settings = DEPLOY / "compose" / "kvstrata.yaml"
    engine = services["engine"]
    yield CommandLine("compose server", services["server"]["command"], settings=settings)
    yield CommandLine("compose engine", ["serve", *engine["command"]], engine["environment"])


def _of_kubernetes() -> Iterator[CommandLine]:
    for name, pod in pods():
        for container in pod["containers"]:
            where = f"kubernetes {name}"
            environment = {each["name"]: each["value"] for each in container.get("env", ())}
            if container["image"].startswith("kvstrata-server"):
                yield CommandLine(where, container["args"], environment)
            if container["image"].startswith("kvstrata-engine"):
                yield CommandLine(where, ["serve", *container["args"]], environment)
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                command = container[probe].get("exec", {}).get("command", [""])
                if command[0] == "kvstrata":
                    yield CommandLine(f"{where} {probe}", command[1:])


def _of_systemd() -> Iterator[CommandLine]:
    folder = DEPLOY / "systemd"
    for name in ("kvstrata@.service", "vllm@.service"):
        pairs = unit(name)
        set_there = dict(v.split("=", 1) for k, v in pairs if k == "Environment")
        variables = assignments(folder / "llama.env")
        line = one(pairs, "ExecStart").replace("%i", "llama")
        for variable, value in variables.items():
            line = line.replace(f"${{{variable}}}", value).replace(f"${variable}", value)
        yield CommandLine(f"systemd {name}", line.split()[1:], set_there, folder / "llama.yaml")
