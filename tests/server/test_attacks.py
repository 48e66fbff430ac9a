"""Whatever one client does, another one is answered, and what the server spends on it is bounded.

Every attack is made over real sockets, and a well-behaved engine uses the cache while it runs.
"""

import contextlib
import dataclasses
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.caches import (
    ALICE,
    BLOCK_BYTES,
    BOB,
    PATIENCE_SECONDS,
    config,
    eventually,
    key,
    keys,
    load,
    save,
)
from tests.server.harness import RawClient, engine, serving, worker, worker_hello

from kvstrata.core.errors import InvariantViolated, LimitExceeded
from kvstrata.core.types import NamespaceId
from kvstrata.manager.tasks import TaskState
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient, observe
from kvstrata.server.limits import Limits
from kvstrata.server.server import Server

HELLO = p.Hello(0, p.PROTOCOL_VERSION, "engine", "attacker", BLOCK_BYTES)
OBSERVER = p.Hello(0, p.PROTOCOL_VERSION, "observer")
PING = p.encode(p.Ping(1))


def hello(**changes: object) -> p.Hello:
    return msgspec.structs.replace(HELLO, **changes)


def parts(count: int) -> dict[str, str]:
    return {str(n): "" for n in range(count)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


class Honest:
    """An engine with its worker that saves and finds blocks of its own."""

    def __init__(self, path: Path) -> None:
        self.scheduler = engine(path, "honest")
        self.worker = worker(path, "honest")
        self.count = 0

    def uses_the_cache(self) -> None:
        for _ in range(5):
            self.count += 1
            eventually(self.saves, "there is never room")
            found = self.scheduler.get_match(BOB, keys(self.count, 0))
            assert (found.state, found.matched_blocks) == (TaskState.READY, 2)
            self.scheduler.cancel([found.task_id])

    def saves(self) -> bool:
        """Whether all is saved; what is being written to disk cannot leave at this moment."""
        task = self.scheduler.put_match(BOB, keys(self.count, 0))
        self.scheduler.launch([task.task_id])
        self.scheduler.complete([task.task_id])
        return task.missing == [0, 1] or task.state is TaskState.DONE

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


@contextlib.contextmanager
def honest_at(server: Server) -> Iterator[Honest]:
    honest = Honest(server.path)
    honest.uses_the_cache()
    yield honest
    honest.uses_the_cache()
    honest.close()
    eventually(lambda: not server.clients, "a connection is kept")
    assert server.manager is not None
    report = server.manager.stats()
    assert (report.running_gets, report.running_puts, report.engines) == (0, 0, [])
    server.manager.check()


@contextlib.contextmanager
def arena(path: Path, limits: Limits = Limits()) -> Iterator[tuple[Server, Honest]]:  # noqa: B008 - immutable
    """A server with 64 blocks of host memory, and an honest engine at it."""
    with serving(config(64), path, limits=limits) as server, honest_at(server) as honest:
        yield server, honest


def attacker(server: Server, *messages: p.Request) -> RawClient:
    client = RawClient(server.path)
    client.send(*messages)
    return client


def welcomed(server: Server, hello: p.Hello) -> RawClient:
    client = attacker(server, hello)
    assert isinstance(client.receive(), p.Welcome)
    return client


@contextlib.contextmanager
def storm(server: Server, count: int, data: bytes) -> Iterator[None]:
    """So many engines send *data* again and again, on a thread, and throw the answers away."""
    clients = [welcomed(server, HELLO) for _ in range(count)]
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            for client in clients:
                client.push(data)
                client.is_hung_up_on()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        for client in clients:
            client.close()


# -- clients that do not read --------------------------------------------------------------------


def test_client_that_asks_on_and_never_reads_is_not_read_either_and_then_dropped(
    path: Path,
) -> None:
    limits = Limits(unread_bytes=10_000, send_seconds=0.3)
    with arena(path, limits) as (server, honest):
        client = welcomed(server, OBSERVER)
        frames = p.encode(p.Stats(1)) * 1000
        while client.push(frames):
            honest.uses_the_cache()
            assert server._switchboard._buffered_bytes < 2_000_000
        client.close()


def test_client_that_never_reads_is_not_read_from_while_answers_wait(path: Path) -> None:
    """Not read from, and no request carried out: of the answers, one at most is over the limit."""
    unread_bytes = 10_000
    limits = Limits(unread_bytes=unread_bytes, unread_news_bytes=1 << 30, send_seconds=1e6)
    with arena(path, limits) as (server, honest):
        client = welcomed(server, OBSERVER)
        frames, before = p.encode(p.Stats(1)) * 1000, server.clients

        def takes_any() -> bool:
            """Whether the server reads from it while it serves another."""
            client.sock.setblocking(False)
            try:
                client.sock.send(frames)  # cut anywhere: nobody will read that far
            except BlockingIOError:
                return False
            return True

        def is_left_alone() -> bool:
            assert waiting_bytes(server) < 2 * unread_bytes
            taken = takes_any()
            honest.uses_the_cache()
            return not taken

        eventually(is_left_alone, "it is read from for ever")
        assert waiting_bytes(server) > unread_bytes
        assert server.clients == before
        client.close()


def waiting_bytes(server: Server) -> int:
    """Of answers, until the clients read."""
    clients = list(server._switchboard._clients.values())
    return sum(client.connection.unread_bytes for client in clients)


def test_client_that_never_reads_its_news_holds_no_disk_and_is_dropped(
    tmp_path: Path, path: Path
) -> None:
    """The news are told by the threads that read from the disk: they must not wait for it."""
    limits = Limits(unread_bytes=1 << 30, unread_news_bytes=50_000)
    with serving(config(64, tmp_path / "disk"), path, limits=limits) as server:
        manager = server.manager
        assert manager is not None
        save(manager, ALICE, keys(1))
        with honest_at(server) as honest, contextlib.closing(worker(path, "attacker")):
            assert manager._lower["disk"].drain(PATIENCE_SECONDS)
            client = welcomed(server, HELLO)
            before, rounds = server.clients, 0

            def asks_on() -> bool:
                nonlocal rounds
                rounds += 1
                save(manager, BOB, keys(-rounds, *range(63)))  # ALICE's block leaves host memory
                ask = [p.GetMatch(n, ALICE, key(1)) for n in range(100)]
                client.push(b"".join(p.encode(request) for request in ask))
                honest.uses_the_cache()
                return server.clients < before

            eventually(asks_on, "the client is kept")
            task = honest.scheduler.get_match(ALICE, keys(1))
            found = honest.scheduler.wait([task.task_id], PATIENCE_SECONDS)
            assert {status.state for status in found.values()} <= {TaskState.READY}
            honest.scheduler.cancel([task.task_id])
            client.close()


def test_client_that_reads_late_gets_every_answer_in_order(path: Path) -> None:
    limits = Limits(unread_bytes=10_000)
    with arena(path, limits) as (server, _):
        client = welcomed(server, OBSERVER)
        sender = threading.Thread(
            target=lambda: client.send(*(p.Stats(n) for n in range(2000))),
        )
        sender.start()
        eventually(lambda: server._switchboard._buffered_bytes > 10_000, "nothing waits")
        answers = [client.receive() for _ in range(2000)]
        sender.join()
        assert [a.seq if isinstance(a, p.Report) else a for a in answers] == list(range(2000))
        client.close()


def test_last_words_of_a_client_that_never_read_still_count(path: Path) -> None:
    limits = Limits(unread_bytes=10_000)
    with arena(path, limits) as (server, _), contextlib.closing(worker(path, "attacker")):
        client = welcomed(server, HELLO)
        client.send(p.PutMatch(1, ALICE, key(1), b""))
        answer = client.receive()
        assert isinstance(answer, p.Task)
        task = answer.status.task_id
        client.send(*(p.Stats(n) for n in range(1000)), p.Launch([task]), p.Complete([task]))
        client.close()
        assert server.manager is not None
        manager = server.manager
        eventually(lambda: load(manager, ALICE, [key(1)]) != [], "the block is lost")


# -- clients that say half of it -----------------------------------------------------------------


def test_connections_that_say_nothing_are_dropped(path: Path) -> None:
    with arena(path, Limits(hello_seconds=0.2)) as (_, honest):
        clients = [RawClient(path) for _ in range(30)]
        honest.uses_the_cache()
        for client in clients:
            eventually(client.is_hung_up_on, "it is kept")
            client.close()


@pytest.mark.parametrize("said", [p.encode(OBSERVER)[:3], p.encode(OBSERVER)[:-1]])
def test_half_a_hello_is_none(path: Path, said: bytes) -> None:
    with arena(path, Limits(frame_seconds=0.2)) as (_, honest):
        client = RawClient(path)
        client.sock.sendall(said)
        honest.uses_the_cache()
        eventually(client.is_hung_up_on, "it is kept")
        client.close()


def test_message_that_comes_byte_by_byte_has_to_come_in_time(path: Path) -> None:
    limits = Limits(frame_seconds=0.3)
    with arena(path, limits) as (server, honest):
        clients = [welcomed(server, OBSERVER) for _ in range(30)]
        endless = iter(p.LENGTH.pack(1 << 20) + bytes(1 << 20))
        while not clients[0].is_hung_up_on():
            byte = bytes([next(endless)])
            for client in clients:
                client.push(byte)
            honest.uses_the_cache()
        for client in clients:
            eventually(client.is_hung_up_on, "it is kept")
            client.close()


def test_frame_may_wait_as_long_as_the_server_itself_does_not_read(path: Path) -> None:
    """The rest of a frame lies unread behind a second reset: that is not the client's fault."""
    limits = Limits(frame_seconds=0.2)
    with arena(path, limits) as (server, honest):
        with slow_reset(server) as release:
            client = welcomed(server, OBSERVER)
            client.send(p.Reset(1, ALICE), p.Reset(2, ALICE))
            client.sock.sendall(PING[:5])
            eventually(lambda: _waits(server), "no reset is made")
            for _ in range(100):
                honest.uses_the_cache()
            client.sock.sendall(PING[5:])
            release.set()
        assert [client.receive() for _ in range(3)] == [p.Number(n, 0) for n in (1, 2, 1)]
        client.close()


# -- clients that send much ----------------------------------------------------------------------


def test_unfinished_frames_of_all_clients_are_bounded(path: Path) -> None:
    limits = Limits(buffered_bytes=4 << 20)
    with arena(path, limits) as (server, honest):
        clients = [welcomed(server, OBSERVER) for _ in range(10)]
        piece = p.LENGTH.pack(p.MAX_FRAME_BYTES) + bytes(100_000)
        left = len(clients)
        while left > 5:
            left = sum(client.push(piece) for client in clients)
            assert server._switchboard._buffered_bytes <= 4 << 20
            honest.uses_the_cache()
        for client in clients:
            client.close()


def test_frames_of_the_greatest_length_over_and_over(path: Path) -> None:
    asked = p.encode(p.GetMatch(1, ALICE, os.urandom(32 * p.MAX_KEYS)))
    with arena(path) as (server, honest), storm(server, 3, asked):
        for _ in range(10):
            honest.uses_the_cache()


def test_more_keys_than_a_request_may_have_are_a_miss(path: Path) -> None:
    with arena(path):
        client = engine(path, "attacker")
        many = [bytes(32)] * (p.MAX_KEYS + 1)
        with pytest.raises(LimitExceeded, match="131073 keys in one request exceed 131072"):
            client.get_match(ALICE, many)
        with pytest.raises(LimitExceeded, match="exceed 131072"):
            client.put_match(ALICE, many)
        with pytest.raises(LimitExceeded, match="a frame of"):
            client.get_match(ALICE, many * 3)
        client.ping()
        client.close()


@pytest.mark.parametrize(
    "request_",
    [p.Stats(1), p.Reset(1, ALICE), p.Ping(1), p.GetMatch(1, ALICE, bytes(32 * 1000))],
    ids=lambda request: type(request).__name__,
)
def test_storm_of_requests(path: Path, request_: p.Request) -> None:
    with arena(path) as (server, honest), storm(server, 8, p.encode(request_) * 50):
        for _ in range(3):
            honest.uses_the_cache()


def test_descriptors_that_nobody_wants_are_not_taken(path: Path) -> None:
    with arena(path) as (server, honest):
        client = welcomed(server, OBSERVER)
        before = set(os.listdir("/proc/self/fd"))
        for n in range(50):
            socket.send_fds(client.sock, [p.encode(p.Ping(n))], [0] * 200)
            assert client.receive() == p.Number(n, 0)
        honest.uses_the_cache()
        assert set(os.listdir("/proc/self/fd")) <= before
        client.close()


# -- clients that are many -----------------------------------------------------------------------


def test_connections_are_bounded_and_who_is_refused_is_told(path: Path) -> None:
    with arena(path, Limits(connections=10)) as (server, honest):
        clients = [welcomed(server, OBSERVER) for _ in range(8)]
        for _ in range(20):
            with pytest.raises(LimitExceeded, match="this server has 10 connections"):
                observe(path)
        honest.uses_the_cache()
        clients.pop().close()
        eventually(lambda: server.clients == 9, "a connection is kept")
        observe(path).close()
        for client in clients:
            client.close()


def test_connections_of_one_process_are_bounded_and_another_gets_in(path: Path) -> None:
    knock = (
        "import sys; from pathlib import Path; from kvstrata.server.client import observe;"
        "observe(Path(sys.argv[1])).ping()"
    )
    with arena(path, Limits(connections_per_process=5)) as (server, honest):
        clients = [welcomed(server, OBSERVER) for _ in range(3)]
        with pytest.raises(LimitExceeded, match="this process has 5 connections"):
            observe(path)
        honest.uses_the_cache()
        subprocess.run([sys.executable, "-c", knock, str(path)], check=True)
        for client in clients:
            client.close()


def test_clients_that_come_and_go_leave_nothing(path: Path) -> None:
    with arena(path) as (server, honest):
        for n in range(300):
            client = RawClient(path)
            client.push([b"", PING, p.encode(OBSERVER), p.encode(HELLO)][n % 4])
            client.close()
        honest.uses_the_cache()
        eventually(lambda: server.clients == 2, "a connection is kept")
        assert len(server._switchboard._of_process) == 1
        eventually(lambda: server._switchboard._buffered_bytes == 0, "bytes are kept")
        eventually(lambda: not server._switchboard._timed, "a clock is kept")


def test_offenders_are_logged_up_to_a_point(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), arena(path) as (server, _):
        for _ in range(200):
            client = attacker(server, p.Ping(1))
            assert client.receive() is None
            client.close()
        offender = engine(path, "attacker")
        half = worker(path, "attacker")
        task = offender.put_match(ALICE, keys(1))
        for _ in range(200):
            offender.complete([task.task_id])
        offender.ping()
        offender.close()
        half.close()
    assert 1 < len(caplog.records) <= 40


@pytest.mark.parametrize(
    ("most", "beyond"),
    [
        ([HELLO, p.Launch([1] * 4096)], [HELLO, p.Launch([1] * 4097)]),
        ([HELLO, p.TryWait(1, [1] * 4096)], [HELLO, p.TryWait(1, [1] * 4097)]),
        ([hello(session="x" * 256)], [hello(session="x" * 257)]),
        ([hello(life="x" * 256)], [hello(life="x" * 257)]),
        ([hello(running=[1] * 4096)], [hello(running=[1] * 4097)]),
        ([hello(block_format="int8" + " " * 252)], [hello(block_format="x" * 257)]),
        ([HELLO, p.Register(BOB, parts(256))], [HELLO, p.Register(BOB, parts(257))]),
        ([HELLO, p.Explain(1, "x" * 256)], [HELLO, p.Explain(1, "x" * 257)]),
        ([HELLO, p.Pin(1, BOB, b"", 1e9)], [HELLO, p.Pin(1, BOB, b"", 1.1e9)]),
        ([HELLO, p.PinRequest(1, "x" * 256, 1e9)], [HELLO, p.PinRequest(1, "x" * 257, 1e9)]),
        ([HELLO, p.PinRequest(1, "", 1e9)], [HELLO, p.PinRequest(1, "", 1.1e9)]),
    ],
    ids=[
        *("launch", "try_wait", "session", "life", "running", "format", "parts", "explain"),
        *("pin", "pin_request", "pin_request_ttl"),
    ],
)
def test_message_that_holds_more_than_it_may_ends_the_connection(
    path: Path, most: list[p.Request], beyond: list[p.Request]
) -> None:
    with arena(path) as (server, honest):
        client = attacker(server, *most, p.Ping(77))
        replies = [client.receive()]
        while replies[-1] != p.Number(77, 0):
            assert replies[-1] is not None, "it is hung up on"
            replies.append(client.receive())
        client.close()
        client = attacker(server, *beyond, p.Ping(77))
        while (reply := client.receive()) is not None:
            assert reply != p.Number(77, 0), "it is served"
        client.close()
        honest.uses_the_cache()


def test_frame_of_the_greatest_length_is_heard_and_a_longer_one_ends_the_connection(
    path: Path,
) -> None:
    with arena(path) as (server, honest):
        for extra, answer in ((0, True), (1, False)):
            client = welcomed(server, HELLO)
            client.push(p.LENGTH.pack(p.MAX_FRAME_BYTES + extra))
            eventually(lambda c=client, a=answer: a or c.is_hung_up_on(), "kept")  # type: ignore[misc]
            assert client.is_hung_up_on() is not answer
            client.close()
        honest.uses_the_cache()


def test_each_limit_is_hit_by_a_test_of_this_file() -> None:
    source = Path(__file__).read_text()
    hit = set(re.findall(r"\b(\w+)=", " ".join(re.findall(r"Limits\(([^)]+)\)", source))))
    assert hit == {field.name for field in dataclasses.fields(Limits)}


# -- clients that keep much ----------------------------------------------------------------------


@contextlib.contextmanager
def greedy_at(server: Server, blocks: int) -> Iterator[ManagerClient]:
    """An engine that can look up *blocks* blocks of ALICE's."""
    assert server.manager is not None
    save(server.manager, ALICE, keys(*range(blocks)))
    scheduler, half = engine(server.path, "greedy"), worker(server.path, "greedy")
    yield scheduler
    scheduler.close()
    half.close()


def test_tasks_of_a_client_are_bounded_until_it_ends_some(path: Path) -> None:
    with arena(path, Limits(tasks=3)) as (server, honest), greedy_at(server, 1) as greedy:
        tasks = [greedy.get_match(ALICE, keys(0)).task_id for _ in range(3)]
        for _ in range(20):
            for ask in (greedy.get_match, greedy.put_match, greedy.prefetch):
                with pytest.raises(LimitExceeded, match="has 3 tasks of 3 blocks"):
                    ask(ALICE, keys(0))
        honest.uses_the_cache()
        greedy.launch(tasks[:1])
        greedy.cancel(tasks[:1])  # it runs: this is not its end
        with pytest.raises(LimitExceeded):
            greedy.get_match(ALICE, keys(0))
        greedy.complete(tasks[:1])
        greedy.get_match(ALICE, keys(0))
        greedy.complete(tasks[1:])  # they do not run: this is not their end
        with pytest.raises(LimitExceeded):
            greedy.get_match(ALICE, keys(0))
        greedy.cancel(tasks[1:2])
        greedy.fail(tasks[2:])
        assert greedy.put_match(ALICE, keys(9)).state is TaskState.READY
        greedy.get_match(ALICE, keys(0))
        with pytest.raises(LimitExceeded):
            greedy.get_match(ALICE, keys(0))


def test_thousands_of_tasks_are_under_way_at_a_time(path: Path) -> None:
    with arena(path) as (server, honest), greedy_at(server, 4) as greedy:
        assert server.manager is not None
        read = [greedy.get_match(ALICE, keys(0, 1)).task_id for _ in range(5000)]
        greedy.launch(read[::2])
        written = [greedy.put_match(ALICE, keys(100 + n)).task_id for n in range(32)]
        report = server.manager.stats()
        assert (report.running_gets, report.running_puts) == (5000, 32)
        assert len(greedy.try_wait(read + written)) == 5032
        honest.uses_the_cache()
        greedy.complete(read[::2])
        greedy.cancel(read[1::2] + written)
        assert {status.state for status in greedy.try_wait(read[-10:]).values()} == {
            TaskState.DONE,
            TaskState.CANCELLED,
        }
        server.manager.check()


def test_blocks_of_all_tasks_of_a_client_are_bounded(path: Path) -> None:
    with (
        arena(path, Limits(task_blocks=10)) as (server, honest),
        greedy_at(server, 4) as greedy,
    ):
        for _ in range(3):
            task = greedy.get_match(ALICE, keys(0, 1, 2, 3)).task_id
        with pytest.raises(LimitExceeded, match="has 3 tasks of 12 blocks"):
            greedy.get_match(ALICE, keys(0))
        honest.uses_the_cache()
        greedy.cancel([task])
        assert greedy.get_match(ALICE, keys(0)).matched_blocks == 1


def test_tasks_that_have_run_out_do_not_count_for_ever(path: Path) -> None:
    with arena(path, Limits(tasks=20)) as (server, _), greedy_at(server, 1) as greedy:
        manager = server.manager
        assert manager is not None
        manager._gets._lease_seconds = 0.01
        for _ in range(20):
            greedy.get_match(ALICE, keys(0))

        def is_served_again() -> bool:
            with contextlib.suppress(LimitExceeded):
                manager.get_match(BOB, keys(0))  # whoever asks next, old leases run out
                return greedy.get_match(ALICE, keys(0)).task_id != 0
            return False

        eventually(is_served_again, "it is never served again")


def test_answer_about_many_tasks_is_bounded(path: Path) -> None:
    limits = Limits(tasks_answer_bytes=100)
    with arena(path, limits) as (server, _), greedy_at(server, 4) as greedy:
        tasks = [greedy.get_match(ALICE, keys(0, 1, 2, 3)).task_id for _ in range(9)]
        assert len(greedy.try_wait(tasks[:2] * 50)) == 2
        with pytest.raises(LimitExceeded, match="the answer would be too long"):
            greedy.try_wait(tasks)


def test_more_task_ids_than_a_request_may_have_take_several(path: Path) -> None:
    with arena(path) as (server, _), greedy_at(server, 1) as greedy:
        task = greedy.get_match(ALICE, keys(0)).task_id
        many = [task] + [1] * 5000 + [task]
        assert list(greedy.try_wait(many)) == [task]
        greedy.launch(many)
        greedy.complete(many)
        assert greedy.try_wait(many)[task].state is TaskState.DONE


def test_tasks_of_others_cannot_be_moved(path: Path) -> None:
    with arena(path) as (server, honest):
        task = honest.scheduler.put_match(ALICE, keys(1)).task_id
        for hello in (HELLO, worker_hello("honest")):
            client = welcomed(server, hello)
            if hello.role == "worker":
                client.send(p.Mapped(1))
            ids = [task - 1, task, task + 1]
            client.send(p.Launch(ids), p.Complete(ids), p.Fail(ids), p.Cancel(ids))
            client.close()
        eventually(lambda: server.clients == 2, "a connection is kept")
        assert honest.scheduler.try_wait([task])[task].state is TaskState.READY
        honest.scheduler.cancel([task])


def test_parts_of_namespaces_are_bounded_where_they_are_kept_and_shown(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(shown_namespaces=5, shown_parts_bytes=2000)
    with arena(path, limits) as (server, honest):
        with greedy_at(server, 3) as greedy:
            greedy.register_namespace(BOB, {"much": "x" * (64 << 10)})
            for n in range(20):
                greedy.register_namespace(bytes([n]) * 16, {"some": "x" * 996})
            greedy.register_namespace(ALICE, {"some": "x" * 996})
            greedy.ping()
            report = honest.scheduler.stats()
        assert "takes more than 65536 bytes and is not kept" in caplog.text
        assert report is not None
        assert len(report.namespaces) == 5
        shown: dict[NamespaceId, int] = {
            bytes.fromhex(n.namespace): sum(len(k) + len(v) for k, v in n.parts.items())
            for n in report.namespaces
        }
        assert list(shown)[:2] == [BOB, ALICE]  # most blocks first
        assert sorted(shown.values()) == [0, 0, 0, 1000, 1000]


# -- what waits for disks ------------------------------------------------------------------------


@contextlib.contextmanager
def slow_reset(server: Server) -> Iterator[threading.Event]:
    """What resets have to drop waits for the event, as it would for a disk."""
    manager = server.manager
    assert manager is not None
    release = threading.Event()
    drop = manager.drop_forgotten

    def slow() -> None:
        assert release.wait(PATIENCE_SECONDS)
        drop()

    manager.drop_forgotten = slow  # type: ignore[method-assign]  # the real one, later
    yield release
    release.set()


def _waits(server: Server) -> bool:
    clients = server._switchboard._clients.values()
    return any(client.conversation.is_waiting for client in list(clients))


def test_reset_that_waits_for_a_disk_holds_nobody_but_its_client(path: Path) -> None:
    """And of that only another reset, with what comes after it."""
    with arena(path) as (server, honest):
        with slow_reset(server) as release:
            client = welcomed(server, HELLO)
            client.send(p.Reset(1, ALICE), p.Ping(2), p.Reset(3, ALICE), p.Ping(4))
            assert client.receive() == p.Number(2, 0)
            gone = welcomed(server, HELLO)
            gone.send(p.Reset(1, ALICE), p.Ping(2))
            assert gone.receive() == p.Number(2, 0)
            gone.close()
            eventually(lambda: _waits(server), "the second reset does not wait")
            honest.uses_the_cache()
            assert server.clients == 4, "who comes, resets and goes could leave any number of drops"
            release.set()
        eventually(lambda: server.clients == 3, "a client that has gone is kept")
        assert [client.receive() for _ in range(3)] == [p.Number(n, 0) for n in (1, 3, 4)]
        client.close()


def test_tiers_that_take_long_to_open_hold_nobody_but_their_engine(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    with serving(config(64), path, block_bytes=None) as server:
        open_tiers = server.open

        def slow(block_bytes: int, block_format: str) -> object:
            assert release.wait(PATIENCE_SECONDS)
            return open_tiers(block_bytes, block_format)

        monkeypatch.setattr(server, "open", slow)
        first, second = attacker(server, HELLO), attacker(server, HELLO)
        eventually(lambda: _waits(server), "nothing is opened")
        with contextlib.closing(observe(path)) as observer:
            observer.ping()
            assert observer.stats() is None
        second.close()
        release.set()
        assert isinstance(first.receive(), p.Welcome)
        first.close()


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("forget", p.Reset(2, ALICE)),
        ("drop_forgotten", p.Reset(2, ALICE)),
        ("get_match", p.GetMatch(2, ALICE, b"")),
        ("stats", p.Stats(2)),
    ],
)
def test_bug_costs_one_connection(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    request_: p.Request,
) -> None:
    def buggy(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    with arena(path) as (server, honest):
        client = welcomed(server, HELLO)
        with monkeypatch.context() as patch:
            patch.setattr(server.manager, name, buggy)
            client.send(request_)
            assert client.receive() is None
        client.close()
        honest.uses_the_cache()
    assert "KeyError: 'a bug'" in caplog.text


def test_bug_when_a_client_leaves_harms_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with arena(path) as (server, honest):
        assert server.manager is not None
        disconnect = server.manager.disconnect

        def buggy(owner: int) -> None:
            disconnect(owner)
            raise InvariantViolated("a slot is released twice")

        client = welcomed(server, HELLO)
        before = server.clients
        with monkeypatch.context() as patch:
            patch.setattr(server.manager, "disconnect", buggy)
            client.close()
            eventually(lambda: server.clients == before - 1, "a client that has gone is kept")
        honest.uses_the_cache()
    assert "InvariantViolated: a slot is released twice" in caplog.text
