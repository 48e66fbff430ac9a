"""URL and settings of a Valkey tier: what they mean, and that a wrong one says so."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvstrata.core.errors import ConfigError
from kvstrata.storage.remote.valkey.address import Address, Login, TlsFiles, open_target
from kvstrata.storage.remote.valkey.store import ValkeyAccess, ValkeyStore

PLAIN = ValkeyAccess()


@pytest.mark.parametrize(
    ("url", "addresses", "database"),
    [
        ("valkey://cache", [("cache", 6379)], 0),
        ("redis://cache:7000/3", [("cache", 7000)], 3),
        ("rediss://10.0.0.1:7000/", [("10.0.0.1", 7000)], 0),
        ("valkeys://[fd00::1]:7000", [("fd00::1", 7000)], 0),
        ("valkey://[::1]", [("::1", 6379)], 0),
        ("unix:///run/a%20b/valkey.sock?db=2", [("/run/a b/valkey.sock", 0)], 2),
        ("unix:///run/valkey.sock", [("/run/valkey.sock", 0)], 0),
    ],
)
def test_where(url: str, addresses: list[tuple[str, int]], database: int) -> None:
    target = open_target(url, PLAIN)
    assert target.addresses == tuple(Address(*each) for each in addresses)
    assert target.database == database
    assert (target.tls is not None) == url.startswith(("rediss", "valkeys"))


def test_several_hosts_are_a_cluster_or_sentinels() -> None:
    cluster = open_target("valkey://a,b:1,[::1]:2", ValkeyAccess(cluster=True))
    assert cluster.addresses == (Address("a", 6379), Address("b", 1), Address("::1", 2))
    sentinels = open_target("valkey://a,b:1/4", ValkeyAccess(sentinel="main"))
    assert sentinels.addresses == (Address("a", 26379), Address("b", 1))
    assert (sentinels.sentinel, sentinels.database) == ("main", 4)


@pytest.mark.parametrize(
    ("url", "login"),
    [
        ("valkey://cache", Login()),
        ("valkey://:s%40%2F%25%3A@cache", Login(None, "s@/%:")),
        ("valkey://me:a:b@cache", Login("me", "a:b")),
        ("valkey://me@cache", Login("me")),
        ("unix://me:word@/run/valkey.sock", Login("me", "word")),
    ],
)
def test_who(url: str, login: Login) -> None:
    assert open_target(url, PLAIN).login == login


def test_a_setting_takes_precedence_over_the_url() -> None:
    access = ValkeyAccess(login=Login(password="file"))
    assert open_target("valkey://me:url@cache", access).login == Login("me", "file")


@pytest.mark.parametrize(
    ("url", "access"),
    [
        ("http://cache", PLAIN),
        ("cache:6379", PLAIN),
        ("valkey://", PLAIN),
        ("valkey://a,b", PLAIN),
        ("valkey://a,", ValkeyAccess(cluster=True)),
        ("valkey://cache:0", PLAIN),
        ("valkey://cache:99999", PLAIN),
        ("valkey://cache:s3same", PLAIN),
        ("valkey://fd00::1", PLAIN),
        ("valkey://[::1", PLAIN),
        ("valkey://:s3[same@cache,b", PLAIN),
        ("valkey://cache\n", PLAIN),
        ("valkey://cache/one", PLAIN),
        ("valkey://cache/-1", PLAIN),
        ("valkey://:s3same?@cache", PLAIN),
        ("valkey://:s3same#@cache", PLAIN),
        ("valkey://cache?db=1", PLAIN),
        ("valkey://cache/1", ValkeyAccess(cluster=True)),
        ("valkey://cache", ValkeyAccess(cluster=True, sentinel="main")),
        ("valkey://cache", ValkeyAccess(replicas=True)),
        ("valkey://cache", ValkeyAccess(prefix="")),
        ("valkey://cache", ValkeyAccess(prefix="a*")),
        ("valkey://cache", ValkeyAccess(prefix="{a}")),
        ("valkey://cache", ValkeyAccess(tls=TlsFiles(Path("/ca.pem")))),
        ("valkeys://cache", ValkeyAccess(tls=TlsFiles(Path("/no/such/ca.pem")))),
        ("valkeys://cache", ValkeyAccess(tls=TlsFiles(None, Path(__file__)))),
        ("valkeys://cache", ValkeyAccess(tls=TlsFiles(None, None, Path(__file__)))),
        ("unix://run/valkey.sock", PLAIN),
        ("unix:///run/valkey.sock?password=s3same", PLAIN),
        ("unix:///run/valkey.sock?db=x", PLAIN),
        ("unix:///run/valkey.sock", ValkeyAccess(cluster=True)),
        ("unix:///run/valkey.sock", ValkeyAccess(replicas=True)),
        ("unix:///run/valkey.sock", ValkeyAccess(tls=TlsFiles(Path(__file__)))),
    ],
)
def test_what_is_wrong_is_said_without_secrets(url: str, access: ValkeyAccess) -> None:
    with pytest.raises(ConfigError) as caught:
        open_target(url, access)
    assert caught.value.hint
    assert "s3same" not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_bytes": 0},
        {"block_bytes": 512 << 20},
        {"block_bytes": 1, "timeout_seconds": 0.0},
        {"block_bytes": 1, "ttl_seconds": 0.0},
        {
            "block_bytes": 1,
            "ttl_seconds": 60.0,
            "access": ValkeyAccess(cluster=True, replicas=True),
        },
    ],
)
def test_numbers_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ValkeyStore("valkey://cache", **wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_no_password_shows_in_what_is_printed() -> None:
    access = ValkeyAccess(login=Login("me", "s3same"), sentinel_login=Login("me", "s3same"))
    target = open_target("valkey://other:s3same@cache", access)
    assert "s3same" not in f"{access!r} {target!r} {target.name}"


@pytest.mark.parametrize("package", ["valkey", "libvalkey"])
def test_a_package_that_is_missing_is_named(package: str) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from kvstrata.core.errors import ConfigError\n"
        "from kvstrata.storage.remote.valkey.store import ValkeyStore\n"
        "try: ValkeyStore('valkey://cache', block_bytes=1)\n"
        "except ConfigError as e: print(e)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert b"kvstrata[valkey]" in said
