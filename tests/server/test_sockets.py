"""Who may use the sockets, and what becomes of the sockets of the dead."""

import fcntl
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest
from tests.strangers import NOBODY, needs_root, socket_of_a_stranger, stranger

from kvstrata.core.errors import ConfigError, ServerUnavailable
from kvstrata.server import sockets


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_socket_is_for_its_owner_whatever_the_umask(path: Path) -> None:
    before = os.umask(0)
    try:
        with sockets.listen(path):
            assert mode(path) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_directory_is_for_its_owner(temp: Path) -> None:
    made = sockets.runtime_directory()
    assert made == temp / f"kvstrata-{os.getuid()}"
    assert mode(made) == 0o700
    assert sockets.runtime_directory() == made
    assert sockets.embedded_socket("abc") == made / "abc.sock"
    assert len(sockets.embedded_socket("x" * 200).name) == 45


@pytest.mark.parametrize(
    ("one", "other"), [("x" * 200, "x" * 201), (f"{'i' * 36}_dp1", f"{'i' * 36}_dp10")]
)
def test_engines_with_long_names_have_sockets_of_their_own(
    temp: Path, one: str, other: str
) -> None:
    """vLLM adds its data-parallel rank at the end of a name of 36 characters."""
    assert sockets.embedded_socket(one) != sockets.embedded_socket(other)


def test_name_of_an_engine_is_no_path(temp: Path) -> None:
    assert sockets.embedded_socket("../a/b").parent == sockets.runtime_directory()


def test_socket_in_a_directory_that_is_closed_to_us_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    class Closed(socket.socket):
        connect = closed

    monkeypatch.setattr(socket, "socket", Closed)
    monkeypatch.setattr(Path, "lstat", closed)
    monkeypatch.setattr(Path, "exists", closed)
    with pytest.raises(ConfigError, match="is closed to us"):
        sockets.connect(path)


@pytest.mark.parametrize("bits", [0o750, 0o701, 0o722])
def test_directory_that_others_can_use_is_refused(temp: Path, bits: int) -> None:
    sockets.runtime_directory().chmod(bits)
    with pytest.raises(ConfigError, match="is not a directory that only uid"):
        sockets.runtime_directory()


@needs_root
def test_directory_of_another_is_refused(temp: Path) -> None:
    made = sockets.runtime_directory()
    os.chown(made, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="only uid 0 can use"):
        sockets.runtime_directory()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_directory_that_is_none_is_refused(temp: Path, kind: str) -> None:
    name = temp / f"kvstrata-{os.getuid()}"
    if kind == "file":
        name.touch(0o700)
    else:
        (temp / "elsewhere").mkdir(mode=0o700)
        name.symlink_to(temp / "elsewhere")
    with pytest.raises(ConfigError, match="is not a directory"):
        sockets.runtime_directory()


def test_socket_of_a_dead_server_is_replaced(path: Path) -> None:
    dead_socket(path)
    with sockets.listen(path), sockets.connect(path) as client:
        assert sockets.peer_of(client).uid == os.getuid()


def test_socket_of_a_live_server_is_refused_and_stays(path: Path) -> None:
    with sockets.listen(path):
        with pytest.raises(ConfigError, match=r"a server is running at .* already"):
            sockets.listen(path)
        sockets.connect(path).close()


def test_file_that_is_no_socket_is_refused_and_stays(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is not a socket"):
        sockets.listen(path)
    assert path.read_text() == "precious"


@needs_root
def test_socket_of_another_is_refused_and_stays() -> None:
    with socket_of_a_stranger() as path:
        with pytest.raises(ConfigError, match=f"belongs to uid {NOBODY}, this process is uid 0"):
            sockets.listen(path)
        assert path.is_socket()


@needs_root
def test_server_of_another_is_not_talked_to() -> None:
    with (
        socket_of_a_stranger() as path,
        pytest.raises(ConfigError, match=f"belongs to uid {NOBODY}, this process is uid 0"),
    ):
        sockets.connect(path)


@needs_root
def test_our_socket_is_closed_to_another() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder, "s")

        def knock() -> str:
            try:
                sockets.connect(path)
            except ConfigError as e:
                return str(e)
            return "let in"

        with sockets.listen(path), stranger(knock) as answer:
            assert f"belongs to uid 0, this process is uid {NOBODY}" in answer


def test_nobody_there_is_an_outage(path: Path) -> None:
    with pytest.raises(ServerUnavailable, match="no server answers"):
        sockets.connect(path)
    dead_socket(path)
    with pytest.raises(ServerUnavailable, match="no server answers"):
        sockets.connect(path)


def test_directory_that_is_not_there_is_a_mistake_of_the_operator(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot listen at"):
        sockets.listen(tmp_path / "no" / "s")


def test_dead_sockets_are_swept_and_live_ones_and_strangers_stay(temp: Path) -> None:
    folder = sockets.runtime_directory()
    dead_socket(folder / "dead.sock")
    (folder / "file.sock").write_text("precious")
    (folder / "other").write_text("precious")
    with sockets.listen(folder / "live.sock"):
        sockets.remove_dead_sockets()
        assert sorted(p.name for p in folder.iterdir()) == ["file.sock", "live.sock", "other"]


def test_socket_that_is_bound_and_does_not_listen_yet_is_not_swept(
    temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SweptMeanwhile(socket.socket):
        def listen(self, *backlog: int) -> None:
            sockets.remove_dead_sockets()  # as another server does that starts now
            super().listen(*backlog)

    path = sockets.embedded_socket("new")
    dead_socket(path)
    monkeypatch.setattr(socket, "socket", SweptMeanwhile)
    with sockets.listen(path):
        sockets.connect(path).close()


def test_directory_in_which_somebody_hangs_is_named_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_LOCK_SECONDS", 0.1)
    hung = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(hung, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConfigError, match="another process makes sockets in"):
            sockets.listen(tmp_path / "s")
    finally:
        os.close(hung)
    sockets.listen(tmp_path / "s").close()
