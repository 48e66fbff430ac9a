"""Unix sockets between processes of one user: where they lie, who may use them, framing."""

import contextlib
import fcntl
import os
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from blake3 import blake3

from kvstrata.core.errors import ConfigError, ServerUnavailable

_BACKLOG: Final = 1024  # connections that wait to be accepted
_NAME_CHARACTERS: Final = 40  # of a socket without its suffix: a path holds 107 bytes
_LOCK_SECONDS: Final = 5.0  # a look at a socket takes a second at most
_POLL_SECONDS: Final = 0.05
_PEER: Final = struct.Struct("3i")  # pid, uid, gid: SO_PEERCRED, man 7 unix


def runtime_directory() -> Path:
    """The private directory of this user's sockets, made if absent.

    Raises ``ConfigError`` if something of that name is not a directory of ours, closed to others.
    """
    path = Path(tempfile.gettempdir()) / f"kvstrata-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    ):
        raise ConfigError(
            f"{path} is not a directory that only uid {os.getuid()} can use",
            hint=f"remove {path}, or point TMPDIR to a private directory",
        )
    return path


def embedded_socket(engine_id: str) -> Path:
    """Where the embedded server of engine *engine_id* listens; its workers know it from the id."""
    name = engine_id
    if len(name) > _NAME_CHARACTERS or "/" in name:
        name = blake3(name.encode()).hexdigest(length=_NAME_CHARACTERS // 2)
    return runtime_directory() / f"{name}.sock"


class Peer(NamedTuple):
    """Who is at the other end of a connection."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(credentials)
    return Peer(pid, uid)


def listen(path: Path) -> socket.socket:
    """A listening socket at *path*, mode 0600.

    A socket left by a dead server of ours is replaced. Raises ``ConfigError`` if a server answers
    there, if the path is somebody else's, or if it cannot be used.
    """
    with _locked(path.parent, _LOCK_SECONDS):
        _remove_dead(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        previous = os.umask(0o177)
        try:
            sock.bind(str(path))
            sock.listen(_BACKLOG)
        except OSError as e:
            sock.close()
            raise _unusable(path, e) from e
        finally:
            os.umask(previous)
    return sock


def connect(path: Path) -> socket.socket:
    """A non-blocking connection to the server at *path*, which must run under this user.

    Never waits. Raises ``ServerUnavailable`` if nobody answers, or too many others wait to be
    accepted, and ``ConfigError`` if it is somebody else's.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(str(path))
        owner = peer_of(sock).uid
    except PermissionError as e:
        sock.close()
        raise _not_ours(path, _owner(path)) from e
    except OSError as e:
        sock.close()
        raise ServerUnavailable(
            f"no server answers at {path}: {e.strerror or e}",
            hint=f"start one with 'kvstrata server --socket {path}', or name the socket of another",
        ) from e
    if owner != os.getuid():
        sock.close()
        raise _not_ours(path, owner)
    return sock


def remove_dead_sockets() -> None:
    """Clean the runtime directory of sockets whose servers were killed.

    Not while another process does, or makes a socket there.
    """
    folder = runtime_directory()
    with contextlib.suppress(ConfigError), _locked(folder, 0.0):
        for path in folder.glob("*.sock"):
            with contextlib.suppress(ConfigError, OSError):
                _remove_dead(path)


@contextlib.contextmanager
def _locked(folder: Path, timeout_seconds: float) -> Iterator[None]:
    """Nobody else binds or removes a socket in *folder* meanwhile.

    One that is bound and does not listen yet looks dead. Raises ``ConfigError`` if the folder
    cannot be used, or another process is still at it after *timeout_seconds*.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as e:
        raise _unusable(folder, e) from e
    try:
        deadline = time.monotonic() + timeout_seconds
        while not _try_lock(descriptor, folder):
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"another process makes sockets in {folder} and does not get done",
                    hint="end it, or name a socket in another directory",
                )
            time.sleep(_POLL_SECONDS)  # flock has no timeout of its own
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, folder: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        raise _unusable(folder, e) from e
    return True


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen at {path}: {error.strerror or error}",
        hint="name a socket in a local directory that exists and that you may write to",
    )


def _remove_dead(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    except OSError as e:
        raise ConfigError(f"cannot use {path}: {e.strerror}") from e
    if status.st_uid != os.getuid():
        raise _not_ours(path, status.st_uid)
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(
            f"{path} is there and is not a socket", hint="name another path, or remove the file"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)  # a live server accepts at once; a stopped one has a backlog
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as e:
            raise ConfigError(f"cannot tell who listens at {path}: {e}") from e
    raise ConfigError(
        f"a server is running at {path} already",
        hint="stop it, or name another socket",
    )


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except OSError:  # it lies in a directory of somebody else
        return None


def _not_ours(path: Path, uid: int | None) -> ConfigError:
    owner = "is closed to us" if uid is None else f"belongs to uid {uid}"
    return ConfigError(
        f"the socket {path} {owner}, this process is uid {os.getuid()}",
        hint="run server and engine as the same user, or name another socket",
    )
