"""Where a Valkey is and how to get in: URL and settings, checked before anything is connected."""

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote

from kvstrata.core.errors import ConfigError

__all__ = ["Address", "Login", "Target", "TlsFiles", "ValkeyAccess", "open_target"]

EXAMPLE: Final = "valkey://cache:6379/0"
_TCP: Final = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}  # with TLS?
_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
_URL: Final = re.compile(r"([A-Za-z]+)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(?:#(.*))?")
_PREFIX: Final = re.compile(r"[A-Za-z0-9_.:/-]+")  # nothing that a pattern or a hash tag means


class Address(NamedTuple):
    """Of one server. Port 0: *host* is the path of a unix socket, or the name of a master."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else self.host


@dataclass(frozen=True, slots=True)
class Login:
    """Who we are to a server. Neither is needed where the server asks for nothing."""

    username: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for TLS. Without *ca* the certificates that the system trusts are."""

    ca: Path | None = None
    certificate: Path | None = None  # ours, if the server wants one
    key: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyAccess:
    """What the URL does not say. Host names in server certificates are always checked."""

    login: Login = Login()  # takes precedence over the URL
    tls: TlsFiles = TlsFiles()
    cluster: bool = False
    replicas: bool = False  # of a cluster or behind sentinels are read from, too
    sentinel: str | None = None  # the name of the master; the URL then names the sentinels
    sentinel_login: Login = Login()
    prefix: str = "kvstrata"  # of every key


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What ``open_target`` has made of a URL and its settings."""

    addresses: tuple[Address, ...]
    database: int
    login: Login
    sentinel: str | None
    sentinel_login: Login
    cluster: bool
    replicas: bool
    tls: ssl.SSLContext | None

    @property
    def name(self) -> str:
        """For messages: it holds no secret."""
        return f"valkey {','.join(map(str, self.addresses))}"


def open_target(url: str, access: ValkeyAccess) -> Target:
    """Check *url* and *access*. Raises ``ConfigError``, in which no password shows."""
    if not _PREFIX.fullmatch(access.prefix):
        raise ConfigError(
            f"the prefix {access.prefix!r} of a valkey tier",
            hint="use letters, digits and any of _ . : / -",
        )
    parts = _split(url)
    if parts.scheme == "unix":
        return _unix_target(parts, access)
    if parts.scheme not in _TCP:
        raise ConfigError(
            f"a valkey tier at {parts.scheme}://",
            hint=f"use valkey://, valkeys:// (TLS), redis://, rediss:// or unix://: {EXAMPLE}",
        )
    if parts.query or parts.fragment:
        raise ConfigError(
            "the URL of a valkey tier has a '?' or a '#'",
            hint="write the database as /N, and these characters in a password as %3F and %23",
        )
    userinfo, _, hosts = parts.netloc.rpartition("@")
    port = _SENTINEL_PORT if access.sentinel else _PORT
    target = Target(
        addresses=tuple(_address(host, port) for host in hosts.split(",")),
        database=_database(parts.path.strip("/")),
        login=_login(userinfo, access),
        sentinel=access.sentinel,
        sentinel_login=access.sentinel_login,
        cluster=access.cluster,
        replicas=access.replicas,
        tls=_tls_context(access.tls) if _TCP[parts.scheme] else None,
    )
    _check_topology(target)
    if target.tls is None and access.tls != TlsFiles():
        raise ConfigError(
            "TLS files for a valkey tier without TLS", hint="write rediss:// or valkeys://"
        )
    return target


def _split(url: str) -> SplitResult:
    """As ``urlsplit``, which on newer Pythons takes no list of hosts with an IPv6 address in it."""
    found = _URL.fullmatch(url)
    scheme, *others = found.groups("") if found else ("", "", url, "", "")
    return SplitResult(scheme.lower(), *others)


def _unix_target(parts: SplitResult, access: ValkeyAccess) -> Target:
    if access.cluster or access.replicas or access.sentinel or access.tls != TlsFiles():
        raise ConfigError(
            "a valkey tier on a unix socket has no cluster, no sentinel and no TLS",
            hint=f"give a host: {EXAMPLE}",
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    database = _database(options.pop("db", ""))
    userinfo, _, host = parts.netloc.rpartition("@")
    if host or options or not parts.path.startswith("/"):
        raise ConfigError(
            "the URL of a valkey tier on a unix socket is wrong",
            hint="write unix:///run/valkey/valkey.sock?db=0",
        )
    return Target(
        addresses=(Address(unquote(parts.path), 0),),
        database=database,
        login=_login(userinfo, access),
        sentinel=None,
        sentinel_login=Login(),
        cluster=False,
        replicas=False,
        tls=None,
    )


def _check_topology(target: Target) -> None:
    if target.cluster and target.sentinel:
        raise ConfigError(
            "a valkey tier with both cluster and sentinel",
            hint="a cluster has no sentinels: give one of the two",
        )
    if target.replicas and not (target.cluster or target.sentinel):
        raise ConfigError(
            "a valkey tier with replicas of a single server",
            hint="set cluster or sentinel, which say who they are, or take replicas away",
        )
    if target.cluster and target.database:
        raise ConfigError(
            f"database {target.database} of a valkey cluster", hint="a cluster has database 0 only"
        )
    if len(target.addresses) > 1 and not (target.cluster or target.sentinel):
        raise ConfigError(
            f"{target.name}: several servers that are neither a cluster nor sentinels",
            hint="set cluster or sentinel, or give one server",
        )


def _address(text: str, default_port: int) -> Address:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/\s]+)(?::([0-9]{1,5}))?", text)
    port = int(found[2] or default_port) if found else 0
    if not found or not 0 < port < 65536:
        raise ConfigError(  # without it: what is not a host may be a part of a password
            "a host or a port in the URL of a valkey tier is wrong",
            hint=f"for example {EXAMPLE}; percent-encode what a password has of @ : / ? #",
        )
    return Address(found[1].strip("[]"), port)


def _database(text: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit():
        raise ConfigError(
            "what follows the host in the URL of a valkey tier is no number of a database",
            hint=f"for example {EXAMPLE}; percent-encode what a password has of @ : / ? #",
        )
    return int(text)


def _login(userinfo: str, access: ValkeyAccess) -> Login:
    username, _, password = userinfo.partition(":")
    return Login(
        access.login.username or unquote(username) or None,
        access.login.password or unquote(password) or None,
    )


def _tls_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS 1.2 or later, with the server's certificate and host name checked."""
    if files.key is not None and files.certificate is None:
        raise ConfigError(
            "a TLS key for a valkey tier without a certificate", hint="give the certificate too"
        )
    try:
        context = ssl.create_default_context(cafile=files.ca)
        if files.certificate is not None:
            context.load_cert_chain(files.certificate, files.key)
    except OSError as e:  # ssl.SSLError is one
        named = ", ".join(str(file) for file in (files.ca, files.certificate, files.key) if file)
        raise ConfigError(
            f"the TLS files of a valkey tier cannot be used: {e}", hint=f"check {named}"
        ) from e
    return context
