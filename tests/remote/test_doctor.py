"""What `kvstrata doctor` says of a remote tier that cannot be used, and how to mend it."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import ClassVar

import pytest
from tests.ports import free_port
from tests.remote.mooncake_engine import MooncakeEngine
from tests.remote.objects_engine import (
    BUCKET,
    AzuriteEngine,
    ObjectEngine,
    RcloneEngine,
    environment,
)
from tests.remote.proxy import Fault, Proxy
from tests.remote.valkey_servers import Server

from kvstrata.cli.diagnosis import Finding, check_remote
from kvstrata.core.load import load_config
from kvstrata.core.remote_tiers import RemoteTier

PASSWORD = "open-sesame"
NOWHERE = "no-such-host.invalid"


def tier(url: str) -> RemoteTier:
    lowest = load_config({"tiers": f"host:8MiB | {url}"}, environ={}).lowest_tier
    assert isinstance(lowest, RemoteTier)
    return lowest


def found(url: str, environ: Mapping[str, str] | None = None) -> Finding:
    with environment(environ or {}):
        return check_remote(tier(url), lookup_seconds=10.0)


def problem(url: str, cause: str, environ: Mapping[str, str] | None = None) -> str:
    """The remedy for a tier that cannot be used because of *cause*."""
    finding = found(url, environ)
    assert finding.level == "problem"
    assert f"({cause})" in finding.message
    return finding.remedy


class TestValkey:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        server = Server(tmp_path_factory.mktemp("redis"), "--requirepass", PASSWORD)
        yield server
        server.kill()

    @pytest.fixture
    def proxy(self, server: Server) -> Iterator[Proxy]:
        with closing(Proxy(server.address)) as proxy:
            yield proxy

    @pytest.mark.parametrize(
        ("where", "cause", "remedy"),
        [
            ("valkey://:guess@127.0.0.1:{port}", "credentials", "user, password, ACL"),
            ("valkey://127.0.0.1:{port}", "credentials", "user, password, ACL"),
            (
                f"valkey://:{PASSWORD}@127.0.0.1:{{port}}?database=99",
                "refused",
                "the state and the configuration of the server",
            ),
            (f"valkey://{NOWHERE}", "name", "check the host name and the resolver"),
            ("valkey://127.0.0.1:1", "unreachable", "check that the server runs"),
        ],
    )
    def test_each_fault_has_its_remedy(
        self, server: Server, where: str, cause: str, remedy: str
    ) -> None:
        assert remedy in problem(where.format(port=server.port), cause)

    def test_a_server_that_says_nothing(self, proxy: Proxy) -> None:
        with proxy.failing(Fault.SILENCE):
            remedy = problem(
                f"valkey://:{PASSWORD}@127.0.0.1:{proxy.port}?timeout_seconds=0.3", "timeout"
            )
        assert "timeout_seconds" in remedy

    def test_a_server_without_room(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvstrata.cli.round_trip._PROBE_SECONDS", 0.1)
        with server.client(password=PASSWORD) as client:
            client.config_set("maxmemory", 1)
            try:
                remedy = problem(f"valkey://:{PASSWORD}@127.0.0.1:{server.port}", "full")
            finally:
                client.config_set("maxmemory", 0)
        assert "maxmemory" in remedy

    def test_a_server_that_answers_later_than_requests_wait(self, proxy: Proxy) -> None:
        """It works, and would never be hit."""
        url = f"valkey://:{PASSWORD}@127.0.0.1:{proxy.port}?timeout_seconds=60"
        with proxy.failing(Fault.SLOW, bytes_per_second=200_000):
            finding = check_remote(tier(url), lookup_seconds=0.0002)
        assert finding.level == "warning"
        assert "remote_lookup_seconds" in finding.message
        assert "raise remote_lookup_seconds" in finding.remedy


class ObjectStores:
    """Faults of an engine that speaks HTTP."""

    engine: ClassVar[type[ObjectEngine]]

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectEngine]:
        running = cls.engine()
        running.start(tmp_path_factory.mktemp("engine"))
        yield running
        running.stop()

    def url(self, running: ObjectEngine, bucket: str = BUCKET, **changes: object) -> str:
        host, port = changes.pop("host", "127.0.0.1"), changes.pop("port", running.port)
        region = "&region=us-east-1" if running.scheme == "s3" else ""
        endpoint = running.endpoint(str(host), int(str(port)))
        others = "".join(f"&{name}={value}" for name, value in changes.items())
        return f"{running.scheme}://{bucket}/kv?endpoint={endpoint}{region}{others}"

    def test_a_block_comes_back(self, running: ObjectEngine) -> None:
        finding = found(self.url(running), running.credentials())
        assert (finding.level, finding.remedy) == ("ok", "")

    def test_wrong_credentials(self, running: ObjectEngine) -> None:
        remedy = problem(self.url(running), "credentials", running.credentials(wrong=True))
        assert "check the credentials" in remedy

    def test_no_bucket(self, running: ObjectEngine) -> None:
        remedy = problem(self.url(running, "no-such-bucket"), "refused", running.credentials())
        assert "make the bucket, or correct its name" in remedy

    def test_an_unknown_name(self, running: ObjectEngine) -> None:
        remedy = problem(self.url(running, host=NOWHERE), "name", running.credentials())
        assert "check the host name in the endpoint" in remedy

    def test_nobody_there(self, running: ObjectEngine) -> None:
        remedy = problem(self.url(running, port=1), "unreachable", running.credentials())
        assert "check that the server runs" in remedy

    def test_a_server_that_says_nothing(self, running: ObjectEngine) -> None:
        with closing(Proxy(running.address())) as proxy, proxy.failing(Fault.SILENCE):
            url = self.url(running, port=proxy.port, timeout_seconds=0.5)
            assert "timeout_seconds" in problem(url, "timeout", running.credentials())


class TestS3(ObjectStores):
    engine = RcloneEngine


class TestAzure(ObjectStores):
    engine = AzuriteEngine


class TestMooncake:
    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeEngine]:
        running = MooncakeEngine()
        running.start(tmp_path_factory.mktemp("engine"))
        yield running
        running.stop()

    def test_an_unknown_name(self, running: MooncakeEngine) -> None:
        assert "host name of the master" in problem(f"mooncake://{NOWHERE}:1", "name")

    def test_nobody_there(self, running: MooncakeEngine) -> None:
        remedy = problem(f"mooncake://127.0.0.1:{free_port()}", "unreachable")
        assert "check that mooncake_master" in remedy

    def test_a_master_that_says_nothing(self, running: MooncakeEngine) -> None:
        with closing(Proxy(("127.0.0.1", running.port))) as proxy, proxy.failing(Fault.SILENCE):
            remedy = problem(f"mooncake://127.0.0.1:{proxy.port}", "timeout")
        assert "timeout_seconds" in remedy
