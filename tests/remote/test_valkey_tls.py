"""The store over TLS: right certificates work in every call, wrong ones let nobody in."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final

import pytest
from tests.ports import free_port
from tests.remote.authority import Authority
from tests.remote.faults import folder_of
from tests.remote.proxy import Fault, Proxy
from tests.remote.valkey_servers import Server

from kvstrata.core.errors import TierUnavailable
from kvstrata.core.types import Read, Write
from kvstrata.storage.remote.valkey.address import TlsFiles
from kvstrata.storage.remote.valkey.store import ValkeyAccess, ValkeyStore
from kvstrata.storage.store import Store
from kvstrata.testing import StoreConformance, Traits
from kvstrata.testing.samples import dirty, key, random_value

LARGE_BYTES: Final = 1 << 20


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture(scope="module")
def mutual(authority: Authority) -> TlsFiles:
    """What a client needs whom the server lets in."""
    certificate, key = authority.issue("client")
    return TlsFiles(authority.file, certificate, key)


@pytest.fixture(scope="module")
def tls_port(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server that wants a certificate of each client."""
    certificate, key = authority.issue("server")
    port = free_port()
    server = Server(
        tmp_path_factory.mktemp("tls"),
        *("--tls-port", str(port), "--tls-auth-clients", "yes"),
        *("--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
        *("--tls-ca-cert-file", str(authority.file)),
        port=0,
    )
    yield port
    server.kill()


def open_tls(port: int, files: TlsFiles, prefix: str = "p", **how: object) -> ValkeyStore:
    settings: dict[str, object] = {"block_bytes": 4096, **how}
    return ValkeyStore(
        f"rediss://127.0.0.1:{port}",
        access=ValkeyAccess(prefix=prefix, tls=files),
        **settings,  # type: ignore[arg-type]  # passed on
    )


class TestConformanceOverTls(StoreConformance):
    traits = Traits(persistent=True, bounded=False, counts=False, variable=True)
    port: ClassVar[int]
    files: ClassVar[TlsFiles]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _serve(cls, tls_port: int, mutual: TlsFiles) -> None:
        cls.port, cls.files = tls_port, mutual

    def open_store(self, place: Path) -> Store:
        return open_tls(self.port, self.files, folder_of(place))


def test_large_values(tls_port: int, mutual: TlsFiles) -> None:
    store = open_tls(tls_port, mutual, "large", block_bytes=LARGE_BYTES)
    wanted = [key(number) for number in range(12)]
    values = [memoryview(random_value(number, LARGE_BYTES)) for number in range(12)]
    assert store.write(wanted, [None] * 12, values) == [Write.STORED] * 12
    buffers = [dirty(LARGE_BYTES) for _ in wanted]
    assert store.read_into(wanted, buffers) == [Read.HIT] * 12
    assert buffers == values
    store.close()


@pytest.mark.parametrize("fault", [Fault.SLOW, Fault.SILENCE, Fault.RESET, Fault.CUT])
def test_faults_in_the_middle(tls_port: int, mutual: TlsFiles, fault: Fault) -> None:
    """They end in time, with their cause; the next call is right."""
    proxy = Proxy(("127.0.0.1", tls_port))
    store = open_tls(proxy.port, mutual, "f", block_bytes=LARGE_BYTES, timeout_seconds=3.0)
    value = memoryview(random_value(1, LARGE_BYTES))
    store.write([key(1)], [None], [value])
    with proxy.failing(fault, after_bytes=100_000):
        with pytest.raises(TierUnavailable) as caught:
            store.read_into([key(1)], [dirty(LARGE_BYTES)])
        expected = "timeout" if fault in {Fault.SLOW, Fault.SILENCE} else "unreachable"
        assert caught.value.cause == expected
    buffer = dirty(LARGE_BYTES)
    assert store.read_into([key(1)], [buffer]) == [Read.HIT]
    assert buffer == value
    store.close()
    proxy.close()


def test_a_server_that_nobody_we_trust_has_signed(tls_port: int, tmp_path: Path) -> None:
    other = Authority(tmp_path, "another")
    for files in (TlsFiles(), TlsFiles(other.file, *other.issue("stranger"))):
        store = open_tls(tls_port, files)
        with pytest.raises(TierUnavailable) as caught:
            store.exists([key(1)])
        assert caught.value.cause == "credentials"
        store.close()


def test_a_server_whose_name_is_another(tls_port: int, mutual: TlsFiles) -> None:
    store = ValkeyStore(
        f"valkeys://localhost:{tls_port}", block_bytes=4096, access=ValkeyAccess(tls=mutual)
    )
    with pytest.raises(TierUnavailable, match="certificate is not valid for") as caught:
        store.exists([key(1)])
    assert caught.value.cause == "credentials"
    store.close()


def test_a_client_without_a_certificate(tls_port: int, authority: Authority) -> None:
    store = open_tls(tls_port, TlsFiles(authority.file))
    with pytest.raises(TierUnavailable) as caught:
        store.exists([key(1)])
    assert caught.value.cause == "credentials"
    store.close()


def test_a_server_without_tls(tmp_path: Path, mutual: TlsFiles) -> None:
    server = Server(tmp_path)
    store = open_tls(server.port, mutual)
    with pytest.raises(TierUnavailable):
        store.exists([key(1)])
    server.kill()
    store.close()
