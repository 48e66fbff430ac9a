"""Unix sockets between processes of one user: where they lie, who may use them, framing."""

import contextlib
import os
import socket
import stat
import struct
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from blake3 import blake3

from kvstrata.core.errors import ConfigError, ServerUnavailable

_BACKLOG: Final = 1024  # connections that wait to be accepted
_NAME_CHARACTERS: Final = 40  # of a socket without its suffix: a path holds 107 bytes
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
    _remove_dead(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        sock.bind(str(path))
        sock.listen(_BACKLOG)
    except OSError as e:
        sock.close()
        raise ConfigError(
            f"cannot listen at {path}: {e.strerror or e}",
            hint="name a socket in a directory that exists and that you may write to",
        ) from e
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
            hint="start one with `kvstrata server --socket PATH`",
        ) from e
    if owner != os.getuid():
        sock.close()
        raise _not_ours(path, owner)
    return sock


def remove_dead_sockets() -> None:
    """Clean the runtime directory of sockets whose servers were killed."""
    for path in runtime_directory().glob("*.sock"):
        with contextlib.suppress(ConfigError, OSError):
            _remove_dead(path)


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
