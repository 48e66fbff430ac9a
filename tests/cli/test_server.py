import json
import os
import secrets
import socket
import urllib.request
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from tests.cli.processes import kvstrata, running, until
from tests.cli.traffic import BLOCK_BYTES, NAMESPACE, engine, save, serving, unknown
from tests.ports import free_port

from kvstrata.core.errors import ConfigError
from kvstrata.core.types import BLOCK_KEY_BYTES
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient
from kvstrata.storage.disk_directory import Reservation


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short path: one of a socket holds 107 bytes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def printed(*arguments: str) -> str:
    result = kvstrata(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def save_some(client: ManagerClient, blocks: int, request: str = "") -> list[bytes]:
    keys = unknown(blocks)
    save(client, keys, request)
    return keys


def test_stats_and_inspect_show_what_an_engine_has_saved_and_found(place: Path) -> None:
    with serving(place, "--host-size", "4MiB") as path, engine(path) as client:
        keys = save_some(client, 3)
        found = client.get_match(NAMESPACE, [*keys, b"x" * BLOCK_KEY_BYTES])
        client.launch([found.task_id])
        client.complete([found.task_id])
        client.ping()
        stats = printed("stats", "--socket", str(path), "--json")
        shown = printed("stats", "--socket", str(path))
        exposed = printed("stats", "--socket", str(path), "--prometheus")
        inspected = printed("inspect", "--socket", str(path))
        as_json = printed("inspect", "--socket", str(path), "--json")

    (server,) = json.loads(stats)["servers"]
    assert server["socket"] == str(path)
    report = server["report"]
    (host,) = report["tiers"]
    assert (host["tier"], host["used_blocks"], host["block_bytes"]) == ("host", 3, BLOCK_BYTES)
    assert report["counters"]["kvstrata_lookup_blocks_total{tier=host}"] == 3
    assert report["counters"]["kvstrata_lookup_blocks_total{tier=none}"] == 1
    assert report["counters"]["kvstrata_saved_blocks_total"] == 3

    assert "192.0 KiB" in shown
    assert "looked up, found in host memory" in shown
    assert "saved by engines" in shown

    samples = {
        (sample.name, sample.labels.get("tier", "")): (sample.value, sample.labels["server"])
        for family in text_string_to_metric_families(exposed)
        for sample in family.samples
    }
    expected = {
        ("kvstrata_lookup_blocks_total", "host"): (3.0, str(path)),
        ("kvstrata_tier_used_bytes", "host"): (3.0 * BLOCK_BYTES, str(path)),
    }
    assert samples.items() >= expected.items()

    assert NAMESPACE.hex() in inspected
    assert [line.split() for line in inspected.splitlines()[-2:]] == [
        ["engine", "test", "1"],
        ["model", "tiny"],
    ]
    assert "1 of 1" in inspected
    (server,) = json.loads(as_json)["servers"]
    (namespace,) = server["report"]["namespaces"]
    assert (namespace["blocks"], namespace["host_blocks"]) == (3, 3)
    assert server["report"]["engines"] == [
        {"session": "session-1", "workers": [0], "world_size": 1, "blocks_per_second": None}
    ]


def test_inspect_explains_what_was_decided_for_a_request(place: Path) -> None:
    with serving(place, "--host-size", "4MiB") as path, engine(path) as client:
        keys = save_some(client, 3)
        found = client.get_match(NAMESPACE, keys, request="cmpl-7")
        client.cancel([found.task_id])
        client.ping()
        shown = printed("inspect", "--socket", str(path), "--explain", "cmpl-7")
        as_json = printed("inspect", "--socket", str(path), "--explain", "cmpl-7", "--json")
        unknown = kvstrata("inspect", "--socket", str(path), "--explain", "cmpl-8")
    heading, row, reason, last = shown.splitlines()[-4:]
    assert heading.split()[:3] == ["time", "what", "asked"]
    assert row.split()[1:] == ["load", "3", "3", "0", "0", "3", "-", "-"]
    assert reason == "  why no more: all of it"
    assert last == f"last block found or saved: {keys[2].hex()}"
    (server,) = json.loads(as_json)["servers"]
    (decision,) = server["decisions"]
    assert (decision["request"], decision["taken_blocks"]) == ("cmpl-7", 3)
    assert decision["last_block"] == keys[2].hex()
    assert unknown.returncode == 1
    assert unknown.stderr == (
        "error: no server has decided anything for 'cmpl-8' lately\n"
        "  hint: known are those of the last 4,096 lookups and saves. A prompt shorter than one "
        "block, and one that the engine found whole in its own device memory, are never looked up\n"
    )


def test_without_a_socket_every_live_server_of_the_user_is_shown(place: Path) -> None:
    from kvstrata.server.sockets import runtime_directory

    directory = runtime_directory()
    assert directory.parent == place
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "dead.sock"))
    nobody = kvstrata("stats")
    assert nobody.returncode == 1
    assert f"no cache server is running in {directory}" in nobody.stderr
    with serving(place, "--host-size", "1MiB") as path:
        (directory / "live.sock").symlink_to(path)
        (server,) = json.loads(kvstrata("stats", "--json").stdout)["servers"]
        shown = kvstrata("inspect")
    assert server == {"socket": str(directory / "live.sock"), "report": None}
    assert "waits for its first engine" in shown.stdout


def test_a_disk_tier_survives_a_restart_of_the_server(place: Path) -> None:
    arguments = ["--host-size", "2MiB", "--disk", f"{place}/kv:4MiB", "--block-bytes", "64KiB"]
    with serving(place, *arguments) as path, engine(path) as client:
        save_some(client, 5)
    with serving(place, *arguments) as path:
        shown = json.loads(kvstrata("stats", "--socket", str(path), "--json").stdout)
        inspected = kvstrata("inspect", "--socket", str(path))
    host, disk = shown["servers"][0]["report"]["tiers"]
    assert (host["used_blocks"], disk["used_blocks"]) == (0, 5)
    assert "not used yet" in inspected.stdout


def test_settings_may_come_from_a_file(place: Path) -> None:
    file = place / "a.yaml"
    file.write_text(f"tiers: host:1MiB | disk:{place}/kv:2MiB\n")
    with serving(place, "--config", str(file), "--block-bytes", "64KiB") as path:
        shown = json.loads(kvstrata("stats", "--socket", str(path), "--json").stdout)
    host, disk = shown["servers"][0]["report"]["tiers"]
    assert (host["capacity_blocks"], disk["capacity_blocks"]) == (
        16,
        30,
    )  # the journal takes its part


# --- mistakes --------------------------------------------------------------------------------


def refused(*arguments: str, env: dict[str, str] | None = None) -> str:
    result = kvstrata("server", *arguments, env=env)
    assert result.returncode == 2, result
    assert "Traceback" not in result.stderr
    return result.stderr


def test_a_socket_in_use_is_refused(place: Path) -> None:
    with serving(place, "--host-size", "1MiB") as path:
        message = refused("--socket", str(path), "--host-size", "1MiB")
    assert f"a server is running at {path} already" in message


def test_wrong_settings_end_the_server_with_2(place: Path) -> None:
    path = str(place / "s.sock")
    assert "--socket" in refused("--host-size", "1MiB")
    assert "the host tier wants" in refused("--socket", path, "--host-size", "900TiB")
    assert "the path is" in refused("--socket", "/tmp/" + "x" * 200)
    assert "cannot listen at" in refused("--socket", f"{place}/none/s", "--host-size", "1MiB")
    assert "did you mean KVSTRATA_SOCKET?" in refused(
        "--socket", path, env={"KVSTRATA_SOKCET": "x"}
    )
    contradictory = {"KVSTRATA_LOOKUP_WAIT_SECONDS": "3"}
    assert "longer than lookup_timeout_seconds" in refused("--socket", path, env=contradictory)
    small = ["--socket", path, "--host-size", "1MiB", "--block-bytes", "2MiB"]
    assert "block" in refused(*small)
    assert "--block-bytes: '64K' has an unknown unit" in refused(*small[:-1], "64K")
    assert not (place / "s.sock").exists()


def test_directories_that_cannot_be_used_end_the_server_at_its_start(place: Path) -> None:
    """Not when the first engine tells the size of its blocks."""
    (place / "file").write_text("")
    (place / "full").mkdir()
    (place / "full" / "thesis.tex").write_text("")
    command = ("--socket", str(place / "s.sock"), "--host-size", "1MiB")
    for option, path, complaint in (
        ("--disk", "file", f"{place}/file is not a directory"),
        ("--disk", "file/kv", f"{place}/file is not a directory"),
        ("--disk", "full", f"{place}/full is not empty (found 'thesis.tex')"),
        ("--shared", "none/kv", f"shared store {place}/none/kv cannot be opened"),
        ("--shared", "file", f"shared store {place}/file cannot be opened"),
        ("--shared", "full", f"{place}/full is not empty (found 'thesis.tex')"),
    ):
        assert complaint in refused(*command, option, f"{place}/{path}:1MiB")
    assert not (place / "s.sock").exists()


def test_two_servers_on_one_disk_are_refused_before_an_engine_has_joined(place: Path) -> None:
    """Else both start, and the second one's first engine is told of it."""
    disk = ("--host-size", "2MiB", "--disk", f"{place}/made/kv:4MiB")
    log = place / "first.log"
    with running("server", "--socket", str(place / "first"), *disk, log=log) as first:
        until(lambda: "ready" in log.read_text(), 30, log)
        message = refused("--socket", str(place / "second"), *disk)
        assert f"disk store {place}/made/kv is in use by process {first.pid} (waited" in message
        assert "another directory" in message
        assert not (place / "second").exists()
        with engine(place / "first") as client:
            keys = save_some(client, 3)
    assert (place / "made" / "kv").exists()
    with serving(place, *disk) as path, engine(path) as client:
        found = client.get_match(NAMESPACE, keys)
        assert (found.matched_blocks, found.disk_blocks) == (3, 3)
        client.cancel([found.task_id])


@pytest.mark.parametrize("is_new", [True, False], ids=["which it takes away", "which stays"])
def test_a_server_waits_for_one_that_lets_go_of_its_disk(place: Path, is_new: bool) -> None:
    """Whoever restarts a server may start the new one before the old one has ended."""
    if not is_new:
        (place / "kv").mkdir()
    ending, log = Reservation([place / "kv"]), place / "log"
    disk = ("--host-size", "2MiB", "--disk", f"{place}/kv:4MiB")
    try:
        with running("server", "--socket", str(place / "s.sock"), *disk, log=log) as process:
            until(lambda: f"in use by process {os.getpid()}" in log.read_text(), 30, log)
            ending.close()
            until(lambda: "ready at" in log.read_text(), 30, log)
            assert process.poll() is None, log.read_text()
    finally:
        ending.close()


def test_an_engine_that_a_server_refuses_leaves_its_directory_to_the_server(place: Path) -> None:
    disk = ("--host-size", "2MiB", "--disk", f"{place}/made/kv:4MiB")
    with serving(place, *disk) as path:
        larger = p.Hello(0, p.PROTOCOL_VERSION, "engine", "session-1", 8 << 20)
        with closing(ManagerClient(path, larger)) as client, pytest.raises(ConfigError):
            client.wait_welcome(10)
        assert "is in use by process" in refused("--socket", str(place / "second"), *disk)
    assert not (place / "made").exists()


def test_stats_of_a_socket_where_nobody_answers(place: Path) -> None:
    result = kvstrata("stats", "--socket", str(place / "none.sock"))
    assert result.returncode == 1
    assert "no server answers at" in result.stderr


def test_two_formats_at_once_are_refused() -> None:
    assert kvstrata("stats", "--json", "--prometheus").returncode == 2


def test_operator_pins_blocks_and_ends_the_pin(place: Path) -> None:
    with serving(place, "--host-size", "4MiB") as path, engine(path) as client:
        keys = [key.hex() for key in save_some(client, 3)]
        (place / "keys").write_text("\n".join([*keys, "ff" * BLOCK_KEY_BYTES]))
        where = ("--namespace", NAMESPACE.hex(), "--socket", str(path))
        first = printed("pin", keys[0], *where, "--ttl", "60")
        second = printed("pin", "--keys-from", str(place / "keys"), *where, "--json")
        stats = json.loads(printed("stats", "--socket", str(path), "--json"))
        strange = kvstrata("pin", "ff" * BLOCK_KEY_BYTES, *where)
        assert printed("unpin", "2", "--socket", str(path)) == ""
        assert printed("unpin", "1", "--socket", str(path)) == ""
        gone = kvstrata("unpin", "1", "--socket", str(path))
        after = json.loads(printed("stats", "--socket", str(path), "--json"))
    assert first == f"pin 1 at {path}: 1 of 1 blocks for 60 seconds\n"
    assert json.loads(second) == {"pins": [{"socket": str(path), "number": 2, "blocks": 3}]}
    assert stats["servers"][0]["report"]["pinned_blocks"] == 4
    assert after["servers"][0]["report"]["pinned_blocks"] == 0
    assert (strange.returncode, strange.stdout) == (1, "")
    assert strange.stderr == (
        "error: nothing is pinned: none of these blocks is in host memory or on disk\n"
    )
    assert (gone.returncode, gone.stderr) == (
        1,
        f"error: {path} has no pin 1\n  hint: kvstrata inspect lists those that there are\n",
    )


def test_pins_are_shown(place: Path) -> None:
    where = ("--socket", str(place / "s.sock"))
    with serving(place, "--host-size", "4MiB") as path, engine(path) as client:
        keys = [key.hex() for key in save_some(client, 3)]
        before = printed("stats", *where), printed("inspect", *where)
        printed("pin", *keys, "--namespace", NAMESPACE.hex(), *where, "--ttl", "5000")
        printed("pin", keys[0], "--namespace", NAMESPACE.hex(), *where)
        stats, inspected = printed("stats", *where), printed("inspect", *where)
        exposed = printed("stats", *where, "--prometheus")
        as_json = [json.loads(printed(name, *where, "--json")) for name in ("stats", "inspect")]
    assert "pinned" not in before[0]
    assert "seconds left" not in before[1]
    assert stats.splitlines()[-1] == "pinned: 4 blocks, in 2 pins"
    rows = [line.split() for line in inspected.splitlines()]
    start = rows.index(["pin", "namespace", "blocks", "seconds", "left"])
    (first, *first_row, seconds), second_row = rows[start + 1 : start + 3]
    assert [first, *first_row] == ["1", NAMESPACE.hex(), "3"]
    assert 4900 < int(seconds.replace(",", "")) <= 5000
    assert second_row[:3] == ["2", NAMESPACE.hex(), "1"]
    assert f'kvstrata_pinned_blocks{{server="{path}"}} 4.0' in exposed
    for report in as_json:
        pins = report["servers"][0]["report"]["pins"]
        assert [(pin["number"], pin["blocks"]) for pin in pins] == [(1, 3), (2, 1)]
        assert {pin["namespace"] for pin in pins} == {NAMESPACE.hex()}
        assert 4900 < pins[0]["seconds_left"] <= 5000


def test_operator_pins_the_prompt_of_a_request(place: Path) -> None:
    where = ("--socket", str(place / "s.sock"))
    with serving(place, "--host-size", "1MiB") as path, engine(path) as client:
        save_some(client, 7, "cmpl-7-0-12ab34cd")
        missed = client.get_match(NAMESPACE, [secrets.token_bytes(32)], request="cmpl-8")
        shown = printed("pin", "--request", "cmpl-7", "--ttl", "60", *where)
        as_json = printed("pin", "--request", "cmpl-7-0-12ab34cd", *where, "--json")
        full = kvstrata("pin", "--request", "cmpl-7", *where)
        not_here = kvstrata("pin", "--request", "cmpl-8", *where)
        unknown = kvstrata("pin", "--request", "cmpl-9", *where)
    assert missed.task_id == 0
    assert shown == f"pin 1 at {path}: 7 blocks for 60 seconds\n"
    assert json.loads(as_json) == {"pins": [{"socket": str(path), "number": 2, "blocks": 1}]}
    assert [each.returncode for each in (full, not_here, unknown)] == [1, 1, 1]
    assert full.stderr.startswith("error: no more may be pinned: 8 blocks are, in 2 pins")
    assert "none of these blocks is in host memory or on disk" in not_here.stderr
    assert unknown.stderr == (
        "error: nothing is pinned: no server knows a request 'cmpl-9'\n"
        "  hint: name keys, or an earlier request with the same prompt; known are those of the last "
        "4,096 lookups and saves. A prompt shorter than one block, and one that the engine found whole "
        "in its own device memory, are never looked up\n"
    )


def test_pin_and_clear_of_one_server_do_not_fail_for_another(place: Path) -> None:
    folder = place / f"kvstrata-{os.getuid()}"
    folder.mkdir(mode=0o700)
    log = place / "empty.log"
    waits = running("server", "--socket", str(folder / "a.sock"), "--host-size", "1MiB", log=log)
    with serving(place, "--host-size", "4MiB") as path, engine(path) as client, waits:
        until(lambda: "ready" in log.read_text(), 30, log)
        (folder / "b.sock").symlink_to(path)
        save_some(client, 3, "cmpl-7")
        shown = printed("pin", "--request", "cmpl-7")
        unknown = kvstrata("pin", "--request", "cmpl-8")
        cleared = printed("clear", "--all")
        (row,) = json.loads(printed("clear", "--all", "--json"))["servers"]
    assert shown == f"pin 1 at {folder}/b.sock: 3 blocks for 3600 seconds\n"
    assert unknown.returncode == 1
    assert "no server knows a request 'cmpl-8'" in unknown.stderr
    assert (f"{folder}/a.sock" in cleared, f"{folder}/b.sock" in cleared) == (False, True)
    assert row["socket"] == f"{folder}/b.sock"


def test_socket_may_come_from_the_environment(place: Path) -> None:
    env = {"KVSTRATA_SOCKET": str(place / "s.sock")}
    nowhere = {"KVSTRATA_SOCKET": str(place / "none.sock")}
    with serving(place, "--host-size", "4MiB") as path, engine(path) as client:
        save_some(client, 1, "cmpl-7")
        found = [
            kvstrata(*command, env=env)
            for command in (["stats"], ["inspect"], ["pin", "--request", "cmpl-7"], ["unpin", "1"])
        ]
        other = kvstrata("stats", env=nowhere)
        named = kvstrata("stats", "--socket", str(path), env=nowhere)
    assert [each.returncode for each in found] == [0, 0, 0, 0]
    assert str(path) in found[0].stdout
    assert other.returncode == 1
    assert f"no server answers at {place}/none.sock" in other.stderr
    assert named.returncode == 0


def test_server_does_not_mind_what_engines_are_told_to_join(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTRATA_SOCKET", str(place / "s.sock"))
    for server in ("attached", "embedded"):
        monkeypatch.setenv("KVSTRATA_SERVER", server)
        with serving(place, "--host-size", "1MiB", "--block-bytes", "64KiB") as path:
            assert str(path) in printed("stats")


def test_pin_is_not_looked_for_at_several_servers(place: Path) -> None:
    """Each has pins of its own under the same numbers."""
    folder = place / f"kvstrata-{os.getuid()}"
    folder.mkdir(mode=0o700)
    with ExitStack() as stack:
        for name in ("a", "b"):
            path, log = folder / f"{name}.sock", place / f"{name}.log"
            command = ("server", "--socket", str(path), "--host-size", "1MiB")
            stack.enter_context(running(*command, "--block-bytes", "64KiB", log=log))
            until(lambda log=log: "ready" in log.read_text(), 30, log)  # type: ignore[misc]
        several = kvstrata("unpin", "1")
        one = kvstrata("unpin", "1", "--socket", str(path))
    assert (several.returncode, one.returncode) == (2, 1)
    assert several.stderr.startswith("error: 2 servers are running")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--namespace", "00" * 16], "no key is given"),
        (["abc", "--namespace", "00" * 16], "'abc' is not a key: 64 hexadecimal digits"),
        (["00" * 32], "keys are given and no --namespace"),
        (["00" * 32, "--request", "r"], "--request and keys with a --namespace are two ways"),
        (["--request", "r", "--namespace", "00" * 16], "--request and keys with a --namespace"),
        (["--request", "r", "--keys-from", "-"], "--request and keys with a --namespace"),
        (["00" * 32, "--namespace", "zz"], "'zz' is not a namespace: 32 hexadecimal digits"),
        (["--namespace", "00" * 16, "--keys-from", "/nowhere/k"], "cannot read /nowhere/k"),
    ],
)
def test_pin_that_names_no_block_is_refused(arguments: list[str], complaint: str) -> None:
    result = kvstrata("pin", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {complaint}")
    assert "\n  hint: " in result.stderr


def test_pin_without_tiers_is_refused(place: Path) -> None:
    with serving(place, "--host-size", "4MiB") as path:
        result = kvstrata("pin", "00" * 32, "--namespace", NAMESPACE.hex(), "--socket", str(path))
    assert (result.returncode, result.stdout) == (1, "")
    assert "this server has no tiers yet" in result.stderr


def test_events_are_published_at_the_address_of_the_option(place: Path) -> None:
    address = f"ipc://{place}/events"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe(b"")
    subscriber.connect(address)
    with (
        serving(place, "--host-size", "1MiB", "--kv-events", address) as path,
        engine(path) as client,
    ):

        def hears() -> bool:
            client.reset(NAMESPACE)
            return bool(subscriber.poll(20))

        until(hears, 30, place / "server.log")
        _, number, payload = subscriber.recv_multipart()
        assert len(number) == 8
        assert b"AllBlocksCleared" in payload
    context.destroy(linger=0)


def test_an_address_that_is_none_is_refused(place: Path) -> None:
    result = kvstrata("server", "--socket", str(place / "s"), "--kv-events", "127.0.0.1:5557")
    assert result.returncode != 0
    assert "tcp://127.0.0.1:5557" in result.stderr


def test_metrics_are_served_and_the_log_is_json_if_that_is_asked_for(place: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    options = ("--host-size", "4MiB", "--metrics", address, "--log-format", "json")
    with serving(place, *options) as path, engine(path) as client:
        save_some(client, 3)
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            exposed = answer.read().decode()
    assert f'kvstrata_saved_blocks_total{{server="{path}"}} 3.0' in exposed
    lines = [json.loads(line) for line in (place / "server.log").read_text().splitlines()]
    assert {tuple(line) for line in lines} == {("time", "level", "logger", "message")}
    assert f"metrics at http://{address}/metrics" in [line["message"] for line in lines]
    assert {line["level"] for line in lines} == {"info"}
    assert all(line["time"].endswith("+00:00") for line in lines)
