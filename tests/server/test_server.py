"""A live server: what it answers, what it refuses, whom it drops, and that the others never notice."""

import contextlib
import os
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.caches import (
    ALICE,
    BLOCK_BYTES,
    PATIENCE_SECONDS,
    config,
    content,
    contents,
    eventually,
    key,
    keys,
    load,
    save,
)
from tests.server.harness import RawClient, engine, memfds, serving, worker, worker_hello
from tests.strangers import NOBODY, needs_root, stranger

from kvstrata.core.errors import ConfigError, LimitExceeded, ServerUnavailable
from kvstrata.core.load import load_config
from kvstrata.manager import manager as manager_module
from kvstrata.manager.tasks import TaskState, TaskStatus
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient, observe
from kvstrata.server.server import Server

HELLO = p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", BLOCK_BYTES)
OBSERVER = p.Hello(0, p.PROTOCOL_VERSION, "observer")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    with serving(config(4), path) as made:
        yield made


@pytest.fixture
def witness(server: Server) -> Iterator[ManagerClient]:
    """An honest client, connected before and asking after whatever happens in the test."""
    client = observe(server.path)
    yield client
    client.ping()
    client.close()
    eventually(lambda: not server.clients, "a connection is kept")
    assert server.manager is None or server.manager.stats().engines == []


def raw(server: Server, *messages: p.Request) -> RawClient:
    client = RawClient(server.path)
    client.send(*messages)
    return client


def is_hung_up_on(client: RawClient) -> bool:
    return client.receive() is None


# -- what it answers -----------------------------------------------------------------------------


def test_engine_saves_and_loads_through_memory_that_its_worker_maps(
    server: Server, witness: ManagerClient
) -> None:
    scheduler, half = engine(server.path), worker(server.path)
    descriptor = half.take_descriptor()
    assert descriptor is not None
    welcome = scheduler.wait_welcome(1.0)
    assert (welcome.slots, welcome.slot_bytes) == (4, 4096)
    mapping = os.fdopen(descriptor, "r+b", buffering=0)
    assert os.fstat(descriptor).st_size == 4096 + 4 * 4096

    task = scheduler.put_match(ALICE, keys(1, 2))
    assert (task.state, task.slots, task.missing) == (TaskState.READY, [0, 1], [0, 1])
    scheduler.launch([task.task_id])
    for slot, block in zip(task.slots, keys(1, 2), strict=True):
        os.pwrite(descriptor, content(ALICE, block), 4096 + slot * 4096)
    scheduler.complete([task.task_id])
    found = scheduler.get_match(ALICE, keys(1, 2, 3))
    assert (found.state, found.matched_blocks) == (TaskState.READY, 2)
    stored = [os.pread(descriptor, 4096, 4096 + slot * 4096) for slot in found.slots]
    assert stored == contents(ALICE, keys(1, 2))
    scheduler.launch([found.task_id])
    scheduler.complete([found.task_id])
    assert scheduler.try_wait([found.task_id])[found.task_id].state is TaskState.DONE
    assert scheduler.prefetch(ALICE, keys(1)) == 0
    assert scheduler.reset(ALICE) == 2
    assert scheduler.get_match(ALICE, keys(1)) == TaskStatus(0, TaskState.DONE)
    mapping.close()
    scheduler.close()
    half.close()


def test_promoted_blocks_are_announced_and_can_be_waited_for(tmp_path: Path, path: Path) -> None:
    with serving(config(3, tmp_path / "disk"), path) as server:
        manager = server.manager
        assert manager is not None
        assert "disk" in manager._lower
        for blocks in (keys(1, 2), keys(7, 8, 9)):
            save(manager, ALICE, blocks)
            assert manager._lower["disk"].drain(PATIENCE_SECONDS)
        with contextlib.closing(engine(path)) as scheduler, contextlib.closing(worker(path)):
            for _ in range(2):
                task = scheduler.get_match(ALICE, keys(1, 2))
                (status,) = scheduler.wait([task.task_id], PATIENCE_SECONDS).values()
                assert status.state is TaskState.READY
                found = [bytes(manager.view(slot)) for slot in status.slots]
                assert found == contents(ALICE, keys(1, 2))
                scheduler.cancel([task.task_id])


def test_stats_before_any_engine_say_that_there_is_nothing_to_say(path: Path) -> None:
    with serving(config(4), path, block_bytes=None) as server:
        with contextlib.closing(observe(path)) as client:
            assert client.stats() is None
        with contextlib.closing(engine(path)), contextlib.closing(observe(path)) as client:
            report = client.stats()
            assert report is not None
            assert report.engines == [
                {"session": "e", "workers": [], "world_size": 1, "blocks_per_second": None}
            ]
        assert server.manager is not None


def test_engine_of_another_block_size_is_told_so(server: Server, witness: ManagerClient) -> None:
    hello = p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", 2 * BLOCK_BYTES)
    client = ManagerClient(server.path, hello)
    with pytest.raises(ConfigError, match="blocks of 8192 bytes do not fit this server"):
        client.wait_welcome(PATIENCE_SECONDS)
    client.close()


@pytest.mark.parametrize(
    ("servers", "engines", "message"),
    [
        (
            "exact",
            "int8 bfloat16",
            "wants blocks kept as 'int8 bfloat16', this server keeps 'exact'",
        ),
        ("int8", "exact", "wants blocks kept as 'exact', this server keeps 'int8'"),
        ("int8", "int8 float16", "keeps blocks as 'int8 bfloat16', not as 'int8 float16'"),
    ],
)
def test_engine_that_wants_blocks_kept_otherwise_is_refused(
    path: Path, servers: str, engines: str, message: str
) -> None:
    with serving(config(4, block_format=servers), path, block_bytes=None):
        if servers == "int8" and engines != "exact":
            first = engine_of("int8 bfloat16", path)
            first.wait_welcome(PATIENCE_SECONDS)
            first.close()
        client = engine_of(engines, path)
        with pytest.raises(ConfigError, match=message):
            client.wait_welcome(PATIENCE_SECONDS)
        client.close()


def engine_of(block_format: str, path: Path) -> ManagerClient:
    hello = p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", BLOCK_BYTES, block_format=block_format)
    return ManagerClient(path, hello)


@pytest.mark.parametrize("kind", ["disk", "shared"])
def test_engine_whose_keys_do_not_last_is_kept_from_tiers_that_do(
    tmp_path: Path, path: Path, kind: str
) -> None:
    tiers = f"host:64KiB | {kind}:{tmp_path}/kv:1MiB"
    with serving(config(4, tiers=tiers), path):
        hello = p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", BLOCK_BYTES, persistent=False)
        client = ManagerClient(path, hello)
        with pytest.raises(ConfigError, match=f"cannot be told apart.* has a {kind} tier"):
            client.wait_welcome(PATIENCE_SECONDS)
        client.close()


def test_requests_of_one_message_each_are_answered_in_order(
    server: Server, witness: ManagerClient
) -> None:
    client = raw(server, OBSERVER, p.Ping(5), p.Ping(3), p.Stats(9))
    assert client.receive() == p.Welcome(0, b"", 0, 0)
    assert client.receive() == p.Number(5, 0)
    assert client.receive() == p.Number(3, 0)
    assert isinstance(client.receive(), p.Report)
    client.close()


def test_request_that_comes_byte_by_byte_is_answered(
    server: Server, witness: ManagerClient
) -> None:
    client = RawClient(server.path)
    for byte in p.encode(OBSERVER) + p.encode(p.Ping(1)):
        client.sock.sendall(bytes([byte]))
    assert client.receive() == p.Welcome(0, b"", 0, 0)
    assert client.receive() == p.Number(1, 0)
    client.close()


# -- what it refuses -----------------------------------------------------------------------------


def test_another_protocol_is_refused_with_a_hint(server: Server, witness: ManagerClient) -> None:
    client = raw(server, p.Hello(0, 99, "engine", "e", BLOCK_BYTES))
    reply = client.receive()
    assert isinstance(reply, p.Refused)
    assert (reply.seq, reply.code) == (0, "config")
    assert f"speaks protocol 99, this server {p.PROTOCOL_VERSION}" in reply.message
    assert reply.hint == "install the same version of kvstrata on both sides"
    client.close()


@pytest.mark.parametrize(
    "offence",
    [
        [p.Ping(1), p.GetMatch(2, ALICE, key(1))],
        [p.Launch([1])],
        [HELLO, HELLO],
        [OBSERVER, HELLO],
        [p.Hello(0, p.PROTOCOL_VERSION, "operator")],
        [p.Hello(0, p.PROTOCOL_VERSION, "")],
        [p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", 0)],
        [p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", -4096)],
        [p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", BLOCK_BYTES, world_size=0)],
        [p.Mapped(1)],
        [HELLO, p.Mapped(1)],
        [worker_hello(), p.Mapped(1), p.Mapped(2)],
        [OBSERVER, p.GetMatch(1, ALICE, key(1))],
        [OBSERVER, p.Complete([1])],
        [worker_hello(), p.PutMatch(1, ALICE, key(1), b"")],
        [HELLO, p.GetMatch(1, ALICE, b"k" * 33)],
        [HELLO, p.PutMatch(1, ALICE, b"k" * 31, b"")],
        [HELLO, p.PutMatch(1, ALICE, b"k" * 32, b"short")],
        [HELLO, p.GetMatch(1, b"short", b"k" * 32)],
        [HELLO, p.Reset(1, b"")],
        [HELLO, p.Prefetch(1, b"n" * 17, b"")],
        [HELLO, p.Register(b"n", {})],
    ],
    ids=map(str, range(22)),
)
def test_offender_is_hung_up_on(
    server: Server, witness: ManagerClient, offence: list[p.Request]
) -> None:
    client = raw(server, *offence)
    replies = 0
    while client.receive() is not None:
        replies += 1
    assert replies < len(offence)
    client.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x01",
        b"\x00\x00\x00\x00",
        b"\x03\x00\x00\x00abc",
        b"GET / HTTP/1.1\r\n\r\n",
        p.encode(p.Number(1, 2)),
        b"\x04\x00\x00\x00\x93\xa8Reg",
    ],
    ids=["4 GiB", "just over", "nothing", "noise", "http", "a reply", "cut message"],
)
def test_frame_that_is_none_ends_the_connection(
    server: Server, witness: ManagerClient, frame: bytes
) -> None:
    client = raw(server, OBSERVER)
    assert client.receive() == p.Welcome(0, b"", 0, 0)
    client.sock.sendall(frame)
    client.sock.shutdown(socket.SHUT_WR)
    assert is_hung_up_on(client)
    client.close()


@pytest.mark.parametrize("sent", [1, 4, 5, 20])
def test_client_that_dies_within_a_frame_is_forgotten(
    server: Server, witness: ManagerClient, sent: int
) -> None:
    client = RawClient(server.path)
    client.sock.sendall(p.encode(HELLO)[:sent])
    client.close()


def test_bad_news_of_a_task_is_logged_and_the_connection_stays(
    server: Server, witness: ManagerClient, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(engine(server.path)) as client, contextlib.closing(worker(server.path)):
        task = client.put_match(ALICE, keys(1))
        client.complete([task.task_id])
        client.ping()
        assert "cannot complete while ready" in caplog.text
        assert client.try_wait([task.task_id])[task.task_id].state is TaskState.READY


@needs_root
def test_another_user_is_refused_even_if_the_socket_lets_him_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder, "s")

        def knock() -> str:
            client = RawClient(path)
            return "hung up on" if is_hung_up_on(client) else "let in"

        with serving(config(4), path):
            path.chmod(0o666)
            with stranger(knock) as answer:
                assert answer == "hung up on"
            assert f"a connection of uid {NOBODY} is refused" in caplog.text
            observe(path).close()


def test_worker_that_never_mapped_does_not_count(server: Server, witness: ManagerClient) -> None:
    with contextlib.closing(engine(server.path)) as scheduler:
        half = raw(server, worker_hello())
        assert isinstance(half.receive(), p.Welcome)
        assert scheduler.put_match(ALICE, keys(1)) == TaskStatus(0, TaskState.FAILED)
        half.send(p.Mapped(1))
        assert half.receive() == p.Number(1, 0)
        assert scheduler.put_match(ALICE, keys(1)).state is TaskState.READY
        half.close()


# -- whom it drops -------------------------------------------------------------------------------


def test_dead_engine_gives_back_all_once_its_worker_is_gone(
    server: Server, witness: ManagerClient
) -> None:
    manager = server.manager
    assert manager is not None
    scheduler, half = engine(server.path), worker(server.path)
    scheduler.put_match(ALICE, keys(1, 2, 3))
    scheduler.close()
    eventually(lambda: manager.stats().running_puts == 0, "the put is kept")
    manager.check()
    assert manager.stats().tiers[0].used_blocks == 3
    half.close()
    eventually(lambda: manager.stats().tiers[0].used_blocks == 0, "the slots are kept")
    manager.check()


# -- the server itself ---------------------------------------------------------------------------


def test_server_outlives_a_moment_without_file_descriptors(
    server: Server, witness: ManagerClient, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as client:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(client.fileno())  # the lowest that is free, as accept would take it
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            client.connect(str(server.path))
            eventually(lambda: "Too many open files" in caplog.text, "it is accepted")
            witness.ping()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        client.settimeout(PATIENCE_SECONDS)
        client.sendall(p.encode(OBSERVER))
        assert client.recv(100) == p.encode(p.Welcome(0, b"", 0, 0))


def test_stopped_server_hangs_up_and_leaves_nothing(tmp_path: Path, path: Path) -> None:
    def first_life() -> None:
        with serving(config(4, tmp_path / "disk"), path) as server:
            client = observe(path)
            assert server.manager is not None
            save(server.manager, ALICE, keys(1, 2))
        with pytest.raises(ServerUnavailable):
            client.ping()
        client.close()

    before = memfds()
    first_life()
    eventually(lambda: memfds() <= before, "the host memory is kept")
    with serving(config(4, tmp_path / "disk"), path) as server:
        assert server.manager is not None
        assert load(server.manager, ALICE, keys(1, 2)) == contents(ALICE, keys(1, 2))


def test_stop_before_serve_ends_serve_at_once(path: Path) -> None:
    server = Server(config(4), path, block_bytes=BLOCK_BYTES)
    server.stop()
    server.serve()
    assert not path.exists()


def test_server_that_cannot_open_its_tiers_leaves_no_socket(path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no block"):
        Server(config(1), path, block_bytes=1 << 20)
    assert not path.exists()


def test_second_server_on_a_socket_is_refused_and_the_first_goes_on(
    server: Server, witness: ManagerClient
) -> None:
    with pytest.raises(ConfigError, match="a server is running"):
        Server(config(4), server.path)
    assert server.path.exists()


def test_namespaces_that_engines_name_are_bounded(
    server: Server, witness: ManagerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reset of an engine makes a new one."""
    monkeypatch.setattr(manager_module, "_KEPT_NAMESPACES", 3)
    with contextlib.closing(engine(server.path)) as client:
        for n in range(5):
            client.register_namespace(bytes([n]) * 16, {"n": str(n)})
        report = client.stats()
    assert report is not None
    assert [n.parts for n in report.namespaces] == [{"n": "2"}, {"n": "3"}, {"n": "4"}]


# -- noise ---------------------------------------------------------------------------------------

REAL: list[Callable[[], p.Request]] = [
    lambda: p.GetMatch(1, ALICE, key(1) + key(2)),
    lambda: p.PutMatch(2, ALICE, key(1) + key(2), b""),
    lambda: p.Launch([1, 2, 3]),
    lambda: p.Complete([1, 2, 3]),
    lambda: p.Fail([1, 2, 3]),
    lambda: p.Cancel([1, 2, 3]),
    lambda: p.Reset(3, ALICE),
    lambda: p.Prefetch(4, ALICE, key(1)),
    lambda: p.TryWait(5, [1, 2**63]),
]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fuzz")
    with serving(config(4, folder / "disk"), folder / "s") as server:
        with contextlib.closing(worker(server.path)):
            yield server
        eventually(lambda: not server.clients, "a connection is kept")
        assert server.manager is not None
        server.manager.check()
        assert server.manager.stats().running_puts == 0


@settings(max_examples=60)
@given(
    script=st.lists(
        st.one_of(
            st.sampled_from(REAL).map(lambda make: p.encode(make())),
            st.binary(max_size=40).map(lambda body: p.LENGTH.pack(len(body)) + body),
            st.builds(
                lambda make, at, noise: p.encode(make())[:at] + noise + p.encode(make())[at:],
                st.sampled_from(REAL),
                st.integers(0, 60),
                st.binary(max_size=4),
            ),
            st.binary(max_size=40),
        ),
        max_size=8,
    )
)
def test_noise_of_one_client_harms_no_other(fuzzed: Server, script: list[bytes]) -> None:
    client = raw(fuzzed, HELLO)
    with contextlib.suppress(OSError):
        for data in script:
            client.sock.sendall(data)
    client.close()
    with contextlib.closing(observe(fuzzed.path)) as honest:
        report = honest.stats()
        assert report is not None
        assert report.tiers[0].capacity_blocks == 4


def test_decisions_can_be_asked_for_by_request(path: Path) -> None:
    with serving(config(4), path):
        client, half = engine(path), worker(path)
        put = client.put_match(ALICE, keys(1, 2), request="r1")
        client.launch([put.task_id])
        client.complete([put.task_id])
        client.submit(p.Measured(100.0))
        get = client.get_match(ALICE, keys(1, 2, 3), request="r1")
        with contextlib.closing(observe(path)) as operator:
            saved, loaded = operator.explain("r1")
            assert operator.explain("r2") == []
        assert (saved.kind, saved.asked_blocks, saved.taken_blocks) == ("put", 2, 2)
        assert (loaded.kind, loaded.asked_blocks, loaded.host_blocks) == ("get", 3, 2)
        assert (loaded.taken_blocks, loaded.reason) == (2, "all")
        assert loaded.recompute_seconds == pytest.approx(0.02)
        assert loaded.task_id == get.task_id
        client.close()
        half.close()


def test_operator_can_pin(path: Path) -> None:
    with serving(config(4), path):
        client, half = engine(path), worker(path)
        put = client.put_match(ALICE, keys(1, 2))
        client.launch([put.task_id])
        client.complete([put.task_id])
        client.ping()  # all that came before it has been done
        with contextlib.closing(observe(path)) as operator:
            number, blocks = operator.pin(ALICE, keys(1, 2), 60.0)
            assert blocks == 2
        with contextlib.closing(observe(path)) as operator:
            assert operator.unpin(number)
            assert not operator.unpin(number)
        client.close()
        half.close()


def test_operator_can_pin_what_a_request_has_saved(path: Path) -> None:
    with serving(config(4), path):
        client, half = engine(path), worker(path)
        put = client.put_match(ALICE, keys(1, 2, 3), request="r1")
        client.launch([put.task_id])
        client.complete([put.task_id])
        client.ping()
        with contextlib.closing(observe(path)) as operator:
            assert operator.pin_request("r1", 60.0) == (1, 2)
            with pytest.raises(LimitExceeded, match="no more may be pinned"):
                operator.pin(ALICE, keys(1), 60.0)
            assert operator.pin(ALICE, keys(9), 60.0) == (0, 0)
            assert operator.pin_request("r2", 60.0) == (0, 0)
            report = operator.stats()
        assert report is not None
        assert [(pin.number, pin.blocks) for pin in report.pins] == [(1, 2)]
        client.close()
        half.close()


def test_directories_that_no_engine_could_use_are_refused_at_once(
    path: Path, tmp_path: Path
) -> None:
    tiers = {"tiers": f"host:1MiB | shared:{tmp_path}/none/kv:1MiB"}
    with pytest.raises(ConfigError, match=r"cannot be opened: .*No such file or directory"):
        Server(load_config(tiers, environ={}), path)
    assert not path.exists()
