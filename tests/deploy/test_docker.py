"""The images and the compose file: what linters say, and what they cannot know."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.files import DEPLOY, ROOT, UID, compose, dockerfile, run, tool

from kvstrata import __version__
from kvstrata.core.load import load_config
from kvstrata.core.units import parse_bytes

COMPOSE = DEPLOY / "compose"
SOCKET_FOLDER = "/run/kvstrata"


def services() -> dict[str, Any]:
    found: dict[str, Any] = compose()["services"]
    return found


def test_hadolint_finds_nothing() -> None:
    done = run(tool("hadolint"), str(DEPLOY / "docker" / "Dockerfile"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_page_says_what_looks_at_each_file() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    table = page.partition("| looked at by |")[2].partition("\n\n")[0]
    assert "`kubernetes/`, the other files" in table
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    named = set(re.findall(r"`([\w./*-]+)`", table)) | {"kubernetes/*", "systemd/*.service"}
    unnamed = {
        str(path.relative_to(DEPLOY))
        for path in files
        if not any(path.relative_to(DEPLOY).match(pattern) for pattern in named)
    }
    assert (len(files) > 15, unnamed) == (True, set())


def test_the_images_hold_what_is_there_and_no_more() -> None:
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    let_through = {line[1:] for line in ignored if line.startswith("!")}
    sources = [
        name
        for word, rest in dockerfile()
        if word == "COPY" and "--from" not in rest
        for name in rest.split()[:-1]
    ]
    assert set(sources) == let_through
    assert all((ROOT / name).exists() for name in sources)


def test_extras_of_the_server_are_extras_of_the_package() -> None:
    (extras,) = re.findall(r"kvstrata-\*\.whl\)\[([a-z,]+)\]", str(dockerfile()))
    declared = re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(declared)


def test_what_the_images_take_from_the_lock_is_in_it() -> None:
    lock = (ROOT / "requirements-dev.lock").read_text()
    assert re.search(r"^hatchling==", lock, re.MULTILINE)


def test_both_images_run_as_the_same_user_who_is_not_root() -> None:
    stages = "\n".join(f"{word} {rest}" for word, rest in dockerfile()).split("FROM ")
    for name, entry in (("server", ["kvstrata"]), ("engine", ["kvstrata", "serve"])):
        (stage,) = (each for each in stages if each.splitlines()[0].endswith(f" AS {name}"))
        assert re.findall(r"^USER (.*)$", stage, re.MULTILINE)[-1] == f"{UID}:{UID}"
        assert f"--uid {UID}" in stage
        assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", stage, re.MULTILINE)[0]) == entry


def test_images_are_named_by_the_version() -> None:
    text = "\n".join(path.read_text() for path in DEPLOY.rglob("*") if path.is_file())
    versions = re.findall(r"kvstrata-(?:server|engine):([\w.]+)", text)
    assert len(versions) > 4
    assert set(versions) == {__version__}


def test_no_image_is_whatever_is_latest() -> None:
    for service in services().values():
        assert re.search(r":v?\d+\.\d+", service["image"])


def test_server_and_engine_can_meet() -> None:
    """At one socket in one volume, as one user: no namespace has to be shared."""
    server, engine = services()["server"], services()["engine"]
    assert server["user"] == engine["user"] == f"{UID}:{UID}"
    volumes = [
        next(each for each in service["volumes"] if each["target"] == SOCKET_FOLDER)
        for service in (server, engine)
    ]
    assert [each["source"] for each in volumes] == ["socket", "socket"]
    assert [each.get("read_only", False) for each in volumes] == [False, True]
    options = compose()["volumes"]["socket"]["driver_opts"]["o"].split(",")
    assert {"mode=0700", f"uid={UID}"} <= set(options)
    assert not any(key in service for service in (server, engine) for key in ("ipc", "pid"))
    assert engine["depends_on"]["server"]["condition"] == "service_healthy"


def test_the_server_has_room_and_time_for_what_its_settings_say() -> None:
    server = services()["server"]
    config = load_config({"config_file": str(COMPOSE / "kvstrata.yaml")}, environ={})
    assert isinstance(config.host_tier.capacity, int)
    assert int(server["mem_limit"]) >= config.host_tier.capacity * 1.1
    assert server["stop_grace_period"] == "1m0s"
    assert config.drain_timeout_seconds <= 45
    assert config.disk_tier is not None
    assert [str(path) for path in config.disk_tier.paths] == [
        each["target"] for each in server["volumes"] if each["source"] == "disk"
    ]


def test_nothing_is_published_beyond_this_machine() -> None:
    ports = [port for service in services().values() for port in service.get("ports", ())]
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}
    assert {port["target"] for port in ports} == {3000, 8000, 9090}


def test_valkey_is_in_a_network_of_its_own_with_the_server() -> None:
    members = {name for name, each in services().items() if "cache" in each["networks"]}
    assert members == {"server", "valkey"}
    assert compose()["networks"]["cache"]["internal"] is True
    command = services()["valkey"]["command"]
    asked = command[command.index("--maxmemory") + 1].replace("gb", "GiB")
    assert parse_bytes(asked) < int(services()["valkey"]["mem_limit"])


def test_a_store_elsewhere_can_be_reached_where_that_is_asked_for() -> None:
    reached, networks = compose("elsewhere.yaml"), compose()["networks"]
    assert all(networks[name].get("internal") for name in services()["server"]["networks"])
    assert not networks["default"].get("internal")
    server = reached["services"]["server"]
    assert set(server.pop("networks")) == {"cache", "monitoring", "default"}
    assert server == {k: v for k, v in services()["server"].items() if k != "networks"}


def test_our_containers_cannot_become_more_than_they_are() -> None:
    for name in ("server", "engine", "valkey"):
        assert services()[name]["cap_drop"] == ["ALL"]
        assert services()[name]["security_opt"] == ["no-new-privileges:true"]
    assert services()["server"]["read_only"] is True


@pytest.mark.parametrize("name", ["server", "prometheus", "grafana"])
def test_files_that_are_mounted_are_there(name: str) -> None:
    binds = [each for each in services()[name]["volumes"] if each["type"] == "bind"]
    assert binds
    assert all(Path(each["source"]).is_file() and each["read_only"] for each in binds)


def test_prometheus_understands_its_files_where_they_are_mounted(tmp_path: Path) -> None:
    service = services()["prometheus"]
    for each in service["volumes"]:
        if each["type"] == "bind":
            target = tmp_path / each["target"].removeprefix("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(each["source"], target)
    (option,) = (o for o in service["command"] if o.startswith("--config.file="))
    config = tmp_path / option.removeprefix("--config.file=/")
    done = run(tool("promtool"), "check", "config", str(config))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout


def test_prometheus_scrapes_services_at_ports_that_they_listen_at() -> None:
    jobs = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
    targets = [t for job in jobs for static in job["static_configs"] for t in static["targets"]]
    assert targets == ["engine:8000", "server:9464"]
    config = load_config({"config_file": str(COMPOSE / "kvstrata.yaml")}, environ={})
    assert config.metrics == "0.0.0.0:9464"
    assert "--port=8000" in services()["engine"]["command"]
    for name in ("engine", "server", "prometheus"):
        assert "monitoring" in services()[name]["networks"]


def test_grafana_gets_the_dashboard_and_a_source_for_it() -> None:
    (source,) = yaml.safe_load((COMPOSE / "grafana" / "datasources.yaml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus"
    assert source["isDefault"] is True
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((COMPOSE / "grafana" / "dashboards.yaml").read_text())["providers"]
    mounts = {each["target"]: Path(each["source"]) for each in services()["grafana"]["volumes"]}
    (board,) = (t for t in mounts if t.startswith(provider["options"]["path"]))
    assert mounts[board] == ROOT / "docs" / "grafana-dashboard.json"
    provisioning = [t for t in mounts if t.startswith("/etc/grafana/provisioning/")]
    assert {Path(t).parent.name for t in provisioning} == {"datasources", "dashboards"}
