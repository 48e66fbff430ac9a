"""The client against servers that are slow, silent, wrong or gone: it waits no longer than told."""

import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.caches import ALICE, PATIENCE_SECONDS, config, eventually, key, keys
from tests.server.harness import engine, memfds, serving, worker

from kvstrata.core.errors import (
    ConfigError,
    FormatError,
    InvariantViolated,
    KVStrataError,
    NoTiers,
    ProtocolError,
    ServerUnavailable,
    TierUnavailable,
)
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState, TaskStatus
from kvstrata.server import client as subject
from kvstrata.server import protocol as p
from kvstrata.server import sockets
from kvstrata.server.client import ManagerClient, observe, refusal

PROMOTING = TaskStatus(7, TaskState.PROMOTING, [2], [5], matched_blocks=2, disk_blocks=1)
READY = TaskStatus(7, TaskState.READY, [2, 3], [5, 6], matched_blocks=2, disk_blocks=1)


def answer(seq: int, status: TaskStatus) -> p.Task:
    return p.Task(seq, p.pack(status))


def news(status: TaskStatus) -> p.Settled:
    return p.Settled(p.pack(status))


class FakeServer:
    """The other end of one client: the test says each frame by hand."""

    def __init__(self, path: Path) -> None:
        self.listener = sockets.listen(path)
        self.client = ManagerClient(path, p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", 4096))
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(PATIENCE_SECONDS)
        assert isinstance(self.read(), p.Hello)

    def say(self, *replies: p.Reply) -> None:
        self.sock.sendall(b"".join(p.encode(reply) for reply in replies))

    def read(self) -> p.Request:
        length = p.frame_length(self._exactly(4))
        return p.decode_request(self._exactly(length))

    def hears_nothing_more(self) -> bool:
        self.sock.setblocking(False)
        try:
            return self.sock.recv(1) == b""
        except BlockingIOError:
            return True

    def _exactly(self, count: int) -> bytes:
        data = self.sock.recv(count, socket.MSG_WAITALL)
        assert len(data) == count
        return data

    def close(self) -> None:
        self.client.close()
        self.sock.close()
        self.listener.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def fake(path: Path) -> Iterator[FakeServer]:
    made = FakeServer(path)
    yield made
    made.close()


def get(fake: FakeServer) -> subject.Pending:
    pending = fake.client.submit(p.GetMatch(0, ALICE, key(1) + key(2)))
    request = fake.read()
    assert isinstance(request, p.GetMatch)
    assert request.seq == 1
    return pending


def take_all(client: ManagerClient) -> None:
    while client.poll(0.05):
        pass


# -- in which order answers come -----------------------------------------------------------------


def test_answer_then_news(fake: FakeServer) -> None:
    pending = get(fake)
    assert not fake.client.poll(0.0)
    fake.say(answer(1, PROMOTING))
    take_all(fake.client)
    assert pending.status == PROMOTING
    fake.say(news(READY))
    take_all(fake.client)
    assert pending.status == READY
    assert fake.client._promoting == {}


def test_news_that_nobody_waits_for_are_passed_over(fake: FakeServer) -> None:
    pending = get(fake)
    fake.say(answer(1, PROMOTING))
    take_all(fake.client)
    fake.client.launch([7])
    fake.say(news(READY), news(TaskStatus(8, TaskState.READY)))
    take_all(fake.client)
    assert pending.status == PROMOTING
    assert fake.client._promoting == {}


def test_frames_cut_anywhere_are_put_together(fake: FakeServer) -> None:
    pending = get(fake)
    for byte in p.encode(answer(1, PROMOTING)) + p.encode(news(READY)):
        fake.sock.sendall(bytes([byte]))
        fake.client.poll(PATIENCE_SECONDS)
    assert pending.status == READY


# -- giving up -----------------------------------------------------------------------------------


def test_what_is_told_leaves_before_the_next_request(fake: FakeServer) -> None:
    fake.client.tell(p.Complete([3]))
    fake.client.tell(p.Fail([4]))
    assert fake.hears_nothing_more()
    fake.client.submit(p.Ping(0))
    assert [type(fake.read()) for _ in range(3)] == [p.Complete, p.Fail, p.Ping]


def test_what_is_told_leaves_with_the_next_look_at_the_line(fake: FakeServer) -> None:
    fake.client.tell(p.Complete([3]))
    assert fake.client.expects_more
    assert not fake.client.poll()
    assert fake.read() == p.Complete([3])


def test_what_is_told_leaves_before_the_client_hangs_up(fake: FakeServer) -> None:
    fake.client.tell(p.Complete([3]))
    fake.client.close()
    assert fake.read() == p.Complete([3])


def test_abandoned_before_the_answer_cancels_the_task_when_it_comes(fake: FakeServer) -> None:
    pending = get(fake)
    fake.client.abandon(pending)
    fake.say(answer(1, PROMOTING))
    take_all(fake.client)
    assert fake.read() == p.Cancel([7])
    assert pending.status is None
    assert fake.client._promoting == {}
    assert list(fake.client._pending) == [0]  # the hello


def test_abandoned_before_an_answer_without_a_task_cancels_nothing(fake: FakeServer) -> None:
    fake.client.abandon(get(fake))
    fake.say(answer(1, TaskStatus(0, TaskState.DONE)))
    take_all(fake.client)
    assert fake.hears_nothing_more()


@pytest.mark.parametrize("status", [PROMOTING, READY])
def test_abandoned_after_the_answer_cancels_the_task_at_once(
    fake: FakeServer, status: TaskStatus
) -> None:
    pending = get(fake)
    fake.say(answer(1, status))
    take_all(fake.client)
    fake.client.abandon(pending)
    assert fake.read() == p.Cancel([7])
    assert fake.client._promoting == {}


def test_abandoned_although_refused_cancels_nothing(fake: FakeServer) -> None:
    pending = get(fake)
    fake.say(p.Refused(1, "tier_unavailable", "no", None))
    take_all(fake.client)
    fake.client.abandon(pending)
    assert fake.hears_nothing_more()


# -- servers that are wrong ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff\xff\xff\xff",
        b"\x03\x00\x00\x00abc",
        p.encode(p.Number(77, 1)),
        p.encode(p.Ping(1)),
        b"\x0d\x00\x00\x00\x95\xa7Refused\x01\xa1\xff\xa0\xc0"[:4]
        + b"\x95\xa7Refused\x01\xa1\xff\xc0",
    ],
    ids=["4 GiB", "noise", "answer to nothing", "a request", "not utf-8"],
)
def test_frame_that_is_no_answer_is_a_protocol_error(fake: FakeServer, frame: bytes) -> None:
    fake.sock.sendall(frame)
    with pytest.raises(ProtocolError):
        fake.client.poll(PATIENCE_SECONDS)


def test_answer_of_another_kind_is_a_protocol_error(fake: FakeServer) -> None:
    fake.say(p.Number(1, 3))
    with pytest.raises(ProtocolError, match="Number is no answer"):
        fake.client.get_match(ALICE, keys(1))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("config", ConfigError),
        ("format", FormatError),
        ("tier_unavailable", TierUnavailable),
        ("no_tiers", NoTiers),
        ("protocol", ProtocolError),
        ("invariant", InvariantViolated),
        ("of a later version", KVStrataError),
    ],
)
def test_refusal_is_the_exception_that_the_server_raised(
    fake: FakeServer, code: str, kind: type[KVStrataError]
) -> None:
    fake.say(p.Refused(1, code, "what is wrong", "what to do"))
    with pytest.raises(kind, match="what is wrong") as caught:
        fake.client.reset(ALICE)
    assert type(caught.value) is kind
    assert caught.value.hint == "what to do"
    assert type(refusal(p.Refused(1, code, "x", None))) is kind


def test_server_that_hangs_up_is_an_outage(fake: FakeServer) -> None:
    fake.say(p.Number(0, 1))
    fake.sock.close()
    with pytest.raises((ServerUnavailable, ProtocolError)):
        take_all(fake.client)
    with pytest.raises(ServerUnavailable, match="lost"):
        fake.client.submit(p.Ping(0))


def test_frame_cut_by_the_end_of_the_server_is_an_outage(fake: FakeServer) -> None:
    fake.sock.sendall(p.encode(p.Number(0, 1))[:-2])
    fake.sock.close()
    with pytest.raises(ServerUnavailable, match="has hung up"):
        take_all(fake.client)


# -- servers that are silent ---------------------------------------------------------------------


def test_wait_for_a_silent_server_ends(fake: FakeServer) -> None:
    fake.client._timeout_seconds = 0.05
    assert not fake.client.poll(0.01)
    with pytest.raises(ServerUnavailable, match=r"no answer within 0.05 s"):
        fake.client.ping()
    with pytest.raises(ServerUnavailable, match=r"no answer within 0.01 s"):
        fake.client.wait_welcome(0.01)


def test_requests_to_a_server_that_reads_nothing_are_bounded(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_OUTBOX_BYTES", 1 << 20)
    request = p.GetMatch(0, ALICE, bytes(32 * 2000))

    def ask_on() -> None:
        for _ in range(200):
            fake.client.submit(request)
            fake.client.poll(0.0)
            assert len(fake.client._outbox) <= 1 << 20

    with pytest.raises(ServerUnavailable, match="has read nothing for too long"):
        ask_on()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as knock:
        return knock.connect_ex(str(path)) == 0


def test_stopped_server_holds_nobody_and_goes_on_when_it_is_woken(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from kvstrata.server.main import run_server;"
        "from kvstrata.core.config import Config;"
        "run_server(Config(tiers='host:64KiB', prefault=False), Path(sys.argv[1]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        eventually(lambda: listens(path), "the server does not start")
        client = observe(path, timeout_seconds=PATIENCE_SECONDS)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: state_of(process.pid) == "T", "it does not stop")
        pending = [client.submit(p.Ping(0)) for _ in range(3)]
        assert not client.poll(0.02)
        other = ManagerClient(path, p.Hello(0, p.PROTOCOL_VERSION, "observer"))
        with pytest.raises(ServerUnavailable, match="no answer within"):
            other.wait_welcome(0.02)
        process.send_signal(signal.SIGCONT)
        eventually(
            lambda: client.poll(0.01) or all(each.reply for each in pending), "no answer comes"
        )
        client.ping()
        client.close()
        other.close()
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0
    assert not path.exists()


# -- servers that are well -----------------------------------------------------------------------


def test_client_has_the_methods_of_the_manager_with_the_same_parameters() -> None:
    names = "register_namespace get_match put_match launch complete fail cancel try_wait wait"
    for name in [*names.split(), "prefetch", "reset", "stats"]:
        ours = list(inspect.signature(getattr(ManagerClient, name)).parameters)
        theirs = list(inspect.signature(getattr(KVManager, name)).parameters)
        assert ours == [n for n in theirs if n not in {"owner", "settled"}]


def test_request_larger_than_the_socket_holds_is_answered(path: Path) -> None:
    with serving(config(4), path):
        client, half = engine(path), worker(path)
        long = [n.to_bytes(32, "big") for n in range(30_000)]
        assert client.get_match(ALICE, long) == TaskStatus(0, TaskState.DONE)
        assert client.put_match(ALICE, long).missing == [0, 1, 2, 3]
        client.close()
        half.close()


def test_another_thread_can_end_a_poll(path: Path) -> None:
    with serving(config(4), path):
        client = observe(path)
        ended = list[str]()

        def poll() -> None:
            try:
                client.poll(PATIENCE_SECONDS * 10)
            except ServerUnavailable as e:
                ended.append(str(e))

        thread = threading.Thread(target=poll)
        thread.start()
        client.shutdown()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
        assert len(ended) == 1
        client.close()
        client.close()


def test_descriptor_that_nobody_took_is_closed(path: Path) -> None:
    before = memfds()
    with serving(config(4), path):
        half = worker(path)
        assert memfds() - before
        half.close()
    eventually(lambda: memfds() <= before, "a descriptor stays open")


def test_descriptor_that_was_taken_is_the_callers(path: Path) -> None:
    with serving(config(4), path):
        half = worker(path)
        descriptor = half.take_descriptor()
        assert descriptor is not None
        assert half.take_descriptor() is None
        half.close()
        assert os.fstat(descriptor).st_size == 5 * 4096
        os.close(descriptor)
