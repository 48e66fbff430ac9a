"""The port that Prometheus scrapes: what it answers, to whom, and for how long it waits."""

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.caches import ALICE, BLOCK_BYTES, PATIENCE_SECONDS, config, keys
from tests.ports import free_port
from tests.server.harness import engine, serving, worker

from kvstrata.core.errors import ConfigError
from kvstrata.server.metrics_port import MetricsPort
from kvstrata.server.server import Server


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def address() -> Iterator[str]:
    """Of a port that answers with one metric."""
    address = free_address()
    port = MetricsPort(address, lambda: b"one 1\n")
    yield address
    port.close()
    socket.create_server(("127.0.0.1", int(address.partition(":")[2]))).close()


def get(address: str, path: str = "/metrics", method: str = "GET") -> bytes:
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        body: bytes = answer.read()
        return body


def connected(address: str) -> socket.socket:
    host, _, port = address.partition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)


def test_a_server_tells_what_it_counts(tmp_path: Path) -> None:
    address, path = free_address(), tmp_path / "s"
    with serving(config(8, metrics=address), path, block_bytes=None):
        assert b"# TYPE kvstrata_lookups_total counter" in get(address)
        assert b"kvstrata_lookups_total{" not in get(address)
        with closing(engine(path)) as scheduler, closing(worker(path)):
            scheduler.get_match(ALICE, keys(1, 2))
            families = list(text_string_to_metric_families(get(address).decode()))
    values = {
        (sample.name, sample.labels.get("tier")): sample.value
        for family in families
        for sample in family.samples
        if sample.labels["server"] == str(path)
    }
    assert values["kvstrata_lookup_blocks_total", "none"] == 2
    assert values["kvstrata_tier_capacity_bytes", "host"] == 8 * BLOCK_BYTES
    assert values["kvstrata_engines", None] == 1
    with pytest.raises(urllib.error.URLError):
        get(address)


def test_only_metrics_are_given_and_nothing_is_taken(address: str) -> None:
    assert get(address) == get(address, "/metrics?name[]=one") == b"one 1\n"
    assert get(address, method="HEAD") == b""
    for path, method, code in (("/", "GET", 404), ("/metrics", "POST", 405)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(address, path, method)
        assert refused.value.code == code
        refused.value.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET /metr", b"x" * 100_000, b"\x00\xff" * 9000, b"\r\n\r\n"]
)
def test_a_client_that_asks_badly_is_hung_up_on_and_the_next_is_answered(
    address: str, sent: bytes
) -> None:
    with connected(address) as client:
        client.sendall(sent)
        assert get(address) == b"one 1\n"
        rest = b""
        try:
            while data := client.recv(4096):
                rest += data
        except ConnectionResetError:
            pass
        assert b"200 OK" not in rest


def test_a_client_that_sends_byte_by_byte_is_hung_up_on(address: str) -> None:
    def drip(client: socket.socket) -> None:
        give_up = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < give_up:
            client.sendall(b"x")
            time.sleep(0.05)  # slower than a message, faster than a silence

    with connected(address) as client, pytest.raises(ConnectionError):
        drip(client)


def test_a_client_that_does_not_read_does_not_hold_others_up() -> None:
    address = free_address()
    port = MetricsPort(address, lambda: b"x" * (64 << 20))
    try:
        with connected(address) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert get(address, method="HEAD") == b""
    finally:
        port.close()


def test_a_port_that_is_taken_is_refused_and_nothing_is_left(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metrics cannot be served at") as refused:
        Server(config(8, metrics=address), tmp_path / "s", block_bytes=BLOCK_BYTES)
    assert refused.value.hint is not None
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "text", ["", "9464", ":9464", "127.0.0.1", "127.0.0.1:0", "h:70000", "::1:9464", "a b:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no address to listen at"):
        config(8, metrics=text)


def test_addresses_of_both_kinds_are_understood() -> None:
    assert config(8, metrics="[::1]:9464").metrics == "[::1]:9464"
    assert config(8, metrics="node-7.example:9464").metrics == "node-7.example:9464"
