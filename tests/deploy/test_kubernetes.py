"""The manifests: what the schemas of Kubernetes say, and what they cannot know."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml
from tests.deploy.files import (
    DEPLOY,
    UID,
    kustomization,
    manifest,
    manifests,
    pods,
    run,
    tool,
)

from kvstrata.core.config import Config
from kvstrata.core.load import load_config
from kvstrata.core.units import parse_bytes

FOLDER = DEPLOY / "kubernetes"
PODS = dict(pods())
CONTAINERS = [
    pytest.param(pod, container, id=f"{name}-{container['name']}")
    for name, pod in PODS.items()
    for container in pod["containers"]
]


def settings(folder: Path) -> Config:
    file = folder / "kvstrata.yaml"
    file.write_text(manifest("ConfigMap", "kvstrata")["data"]["kvstrata.yaml"])
    return load_config({"config_file": str(file)}, environ={})


def validated(file: Path) -> CompletedProcess[str]:
    """What the schemas of Kubernetes say of *file*: of a kind that they do not know, `WARN`."""
    return run(tool("kubernetes-validate"), "--strict", str(file))


@pytest.mark.parametrize("name", [*kustomization()["resources"], "elsewhere.yaml"])
def test_the_schemas_of_kubernetes_know_every_kind_and_field(name: str) -> None:
    done = validated(FOLDER / name)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [each["kind"] for each in yaml.safe_load_all((FOLDER / name).read_text())]
    passed = [line for line in done.stdout.splitlines() if f"{name} passed for resource" in line]
    assert done.stdout.splitlines() == passed, done.stdout
    assert len(passed) == len(kinds) > 0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("kind: Namespace", "kind: Namespaze"),
        ("apiVersion: v1", "apiVersion: v7"),
        ("metadata:", "metadatas:"),
    ],
)
def test_a_kind_or_field_that_nobody_knows_would_be_seen(
    right: str, wrong: str, tmp_path: Path
) -> None:
    text = (FOLDER / "namespace.yaml").read_text()
    assert right in text
    file = tmp_path / "namespace.yaml"
    file.write_text(text.replace(right, wrong, 1))
    assert "passed for resource" not in validated(file).stdout


def test_the_policy_for_a_store_elsewhere_is_of_servers_and_is_left_out_until_it_is_wanted(
    tmp_path: Path,
) -> None:
    (policy,) = yaml.safe_load_all((FOLDER / "elsewhere.yaml").read_text())
    servers = manifest("NetworkPolicy", "servers")
    assert policy["spec"]["podSelector"] == servers["spec"]["podSelector"]
    assert policy["spec"]["policyTypes"] == ["Egress"]
    (egress,) = policy["spec"]["egress"]
    assert egress["ports"] == [{"protocol": "TCP", "port": 443}]
    (to,) = egress["to"]
    assert to["ipBlock"] == {"cidr": "0.0.0.0/0", "except": ["169.254.169.254/32"]}
    copy = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, copy)
    file = copy / "kustomization.yaml"
    file.write_text(file.read_text().replace("  # - elsewhere.yaml", "  - elsewhere.yaml"))
    names = [each["metadata"]["name"] for each in yaml.safe_load_all(built(copy).stdout)]
    assert len(names) == len(manifests()) + 1
    assert "elsewhere" in names


def built(folder: Path) -> CompletedProcess[str]:
    return run(tool("kubectl"), "kustomize", str(folder))


def test_kustomize_builds_all_objects_and_no_other() -> None:
    done = built(FOLDER)
    assert done.returncode == 0, done.stderr
    names = [
        [(each["kind"], each["metadata"]["name"]) for each in objects]
        for objects in (yaml.safe_load_all(done.stdout), manifests())
    ]
    assert sorted(names[0]) == sorted(names[1])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("kind: Kustomization", "kind: Kustomizazion"),
        ("resources:", "resourzes:"),
        ("- server.yaml", "- serfer.yaml"),
    ],
)
def test_kustomize_refuses_what_it_does_not_know(right: str, wrong: str, tmp_path: Path) -> None:
    folder = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, folder)
    file = folder / "kustomization.yaml"
    text = file.read_text()
    assert right in text
    file.write_text(text.replace(right, wrong))
    assert built(folder).returncode != 0


def test_kustomize_takes_the_images_that_are_commented_out(tmp_path: Path) -> None:
    folder = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, folder)
    file = folder / "kustomization.yaml"
    begin, _, hidden = file.read_text().partition("# images:")
    file.write_text(begin + "images:" + hidden.replace("\n#", "\n"))
    done = built(folder)
    assert done.returncode == 0, done.stderr
    for name in ("kvstrata-server", "kvstrata-engine"):
        assert f"image: registry.example.com/{name}:" in done.stdout
        assert f"image: {name}:" not in done.stdout


def test_every_file_is_applied_and_everything_is_in_one_namespace() -> None:
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml", "elsewhere.yaml"}
    assert set(kustomization()["resources"]) == files
    assert kustomization()["resources"][0] == "namespace.yaml"
    for each in manifests()[1:]:
        assert each["metadata"]["namespace"] == "kvstrata"


@pytest.mark.parametrize(("pod", "container"), CONTAINERS)
def test_a_container_has_limits_and_probes_and_no_privileges(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    security = container["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in container["resources"]["limits"]
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe].get("httpGet") or container[probe].get("tcpSocket")
        assert asked is None or asked["port"] in ports


def mount(pod: dict[str, Any], container: dict[str, Any], path: str) -> tuple[str, bool]:
    """Where on the node *path* of *container* lies, and whether it can only be read."""
    (found,) = (each for each in container["volumeMounts"] if each["mountPath"] == path)
    (volume,) = (each for each in pod["volumes"] if each["name"] == found["name"])
    on_node = Path(volume["hostPath"]["path"]) / found.get("subPath", "")
    return str(on_node), found.get("readOnly", False)


def test_server_and_engine_can_meet() -> None:
    """At a directory of the node, as one user, each in namespaces of its own."""
    server, engine = PODS["kvstrata-server"], PODS["vllm"]
    assert mount(server, server["containers"][0], "/run/kvstrata") == ("/run/kvstrata/kv", False)
    assert mount(engine, engine["containers"][0], "/run/kvstrata") == ("/run/kvstrata/kv", True)
    for pod in (server, engine):
        assert pod["securityContext"]["runAsUser"] == UID
        assert not pod.keys() & {"hostUsers", "hostPID", "hostIPC", "hostNetwork"}


def test_directories_of_the_node_are_made_for_the_server_alone() -> None:
    server = PODS["kvstrata-server"]
    (made,) = server["initContainers"]
    assert f"--owner={UID}" in made["command"]
    assert "--mode=0700" in made["command"]
    assert made["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
    of_node = {
        str(Path(volume["hostPath"]["path"]) / Path(folder).name)
        for folder in made["command"]
        for each in made["volumeMounts"]
        for volume in server["volumes"]
        if folder.startswith(each["mountPath"]) and volume["name"] == each["name"]
    }
    used = {
        mount(server, server["containers"][0], path)[0]
        for path in ("/run/kvstrata", "/var/cache/kvstrata")
    }
    assert of_node == used


def test_the_server_has_room_and_time_for_what_its_settings_say(tmp_path: Path) -> None:
    config, pod = settings(tmp_path), PODS["kvstrata-server"]
    (server,) = pod["containers"]
    limit = parse_bytes(server["resources"]["limits"]["memory"] + "B")
    assert isinstance(config.host_tier.capacity, int)
    assert limit >= config.host_tier.capacity * 1.1
    assert server["resources"]["requests"]["memory"] == server["resources"]["limits"]["memory"]
    assert config.drain_timeout_seconds + 15 <= pod["terminationGracePeriodSeconds"]
    assert config.disk_tier is not None
    assert str(config.disk_tier.paths[0]) == "/var/cache/kvstrata"
    (port,) = server["ports"]
    assert config.metrics == f"0.0.0.0:{port['containerPort']}"


def test_selectors_find_the_pods_that_they_mean() -> None:
    labels = {}
    for each in manifests():
        if each["kind"] in {"DaemonSet", "Deployment"}:
            template = each["spec"]["template"]["metadata"]["labels"]
            labels[each["metadata"]["name"]] = template
            assert each["spec"]["selector"]["matchLabels"].items() <= template.items()
    for each in manifests():
        if each["kind"] == "Service":
            selected = [
                n for n, have in labels.items() if each["spec"]["selector"].items() <= have.items()
            ]
            assert selected == [each["metadata"]["name"]]
            (port,) = each["spec"]["ports"]
            (container,) = PODS[selected[0]]["containers"]
            assert port["targetPort"] in {p["name"] for p in container["ports"]}


def test_nobody_is_reached_but_by_whom_a_policy_names() -> None:
    policies = {
        e["metadata"]["name"]: e["spec"] for e in manifests() if e["kind"] == "NetworkPolicy"
    }
    assert policies["nobody"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    servers = policies["servers"]["podSelector"]
    (ingress,) = policies["valkey"]["ingress"]
    assert ingress["from"] == [{"podSelector": servers}]
    for policy in policies.values():
        for rule in [*policy.get("ingress", ()), *policy.get("egress", ())]:
            assert rule["ports"]
            assert rule.get("from") or rule.get("to")


def naming(labels: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Network policies that name pods with *labels*, each with what it names them as."""
    for each in manifests():
        if each["kind"] == "NetworkPolicy":
            spec = each["spec"]
            peers = {
                side: [peer for rule in spec.get(key, ()) for peer in rule[side]]
                for key, side in (("ingress", "from"), ("egress", "to"))
            }
            for place, found in {"of": [spec], **peers}.items():
                wanted = [peer["podSelector"] for peer in found if "podSelector" in peer]
                if any(one.get("matchLabels", {}).items() <= labels.items() for one in wanted):
                    yield each["metadata"]["name"], place


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("DaemonSet", "kvstrata-server", [("nobody", "of"), ("servers", "of"), ("valkey", "from")]),
        ("Deployment", "vllm", [("nobody", "of"), ("engines", "of")]),
    ],
)
def test_policies_hold_for_a_copy_for_a_second_model(
    kind: str, name: str, expected: list[tuple[str, str]]
) -> None:
    """Its selector and its Service have to find no pod of the first."""
    spec = manifest(kind, name)["spec"]
    labels = spec["template"]["metadata"]["labels"]
    copied = labels | dict.fromkeys(spec["selector"]["matchLabels"], "second")
    assert list(naming(labels)) == expected
    assert list(naming(copied)) == expected


def test_nodes_share_the_valkey_that_is_there(tmp_path: Path) -> None:
    tier = settings(tmp_path).lowest_tier
    assert tier is not None
    service = manifest("Service", "valkey")
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    (port,) = service["spec"]["ports"]
    assert getattr(tier, "url", None) == f"valkey://{name}.{namespace}.svc:{port['port']}"
