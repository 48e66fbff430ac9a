"""Object stores of two protocols on loopback: rclone and moto speak S3, Azurite Azure's."""

import base64
import hmac
import os
import resource
import shutil
import signal
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from email.utils import formatdate
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import obstore
from obstore.store import AzureStore, S3Store
from tests.ports import free_port
from tests.remote.proxy import Proxy
from tests.remote.subject import RemoteEngine, answers, wait_until

from kvstrata.core.types import StoreKey
from kvstrata.storage.remote.objects.store import ObjectAccess, ObjectStore
from kvstrata.storage.remote.objects.values import Names

if TYPE_CHECKING:
    from obstore.store import ClientConfig, GCSStore

BUCKET: Final = "blocks"
PREFIX: Final = "some/prefix"
KEY_ID: Final = "AKIDFORTESTS0001"
SECRET: Final = "secret-that-nobody-may-see/0001"
_PROGRAMS: Final = Path(sys.prefix) / "bin"
_AZURITE: Final = Path(sys.prefix) / "node/node_modules/.bin/azurite-blob"
# Azurite's account, the same everywhere.
AZURE_ACCOUNT: Final = "devstoreaccount1"
AZURE_SECRET: Final = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)

_FAST: "ClientConfig" = {"allow_http": True, "timeout": "10s"}


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """*values*, and nothing else that says how to reach a cloud."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            del os.environ[name]
    nowhere = {"AWS_SHARED_CREDENTIALS_FILE": os.devnull + "/none", "AWS_CONFIG_FILE": "/none"}
    os.environ.update({**nowhere, **values})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class ObjectEngine(RemoteEngine):
    """A server that holds its objects in a folder of its own, or in memory."""

    scheme: ClassVar[str] = "s3"

    def start(self, folder: Path) -> None:
        self.folder = folder / "objects"
        self.folder.mkdir()
        self.port = free_port()
        self._launch()

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def open(  # noqa: PLR0913 - the interface
        self,
        *,
        block_bytes: int,
        proxy: Proxy | None = None,
        host: str | None = None,
        wrong_credentials: bool = False,
        ttl_seconds: float | None = None,
        snapshot_seconds: float | None = None,
        timeout_seconds: float = 1.0,
        prefix: str = PREFIX,
        **access: Any,
    ) -> ObjectStore:
        port = self.port if proxy is None else proxy.port
        with environment(self.credentials(wrong=wrong_credentials)):
            return ObjectStore(
                f"{self.scheme}://{BUCKET}/{prefix}",
                block_bytes=block_bytes,
                ttl_seconds=ttl_seconds,
                snapshot_seconds=snapshot_seconds,
                timeout_seconds=timeout_seconds,
                access=ObjectAccess(
                    endpoint=self.endpoint(host or "127.0.0.1", port), region="us-east-1", **access
                ),
            )

    def pids(self) -> Sequence[int]:
        return [self._process.pid]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        self._launch()

    def revive(self) -> None:
        self._launch()

    def stop(self) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGCONT)
            self.kill()

    def raw(self, key: StoreKey) -> bytes | None:
        try:
            return self.get_object(Names(PREFIX).of(key))
        except FileNotFoundError:
            return None

    def get_object(self, name: str) -> bytes:
        return bytes(obstore.get(self.client(), name).bytes())

    def put_raw(self, key: StoreKey, value: bytes) -> None:
        self.put_object(Names(PREFIX).of(key), value)

    def put_object(self, name: str, value: bytes) -> None:
        obstore.put(self.client(), name, value, use_multipart=False)

    def fill(self) -> None:
        """The server may write no more files: what happens on a full disk.

        None of these says so: rclone answers 500.
        """
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def names(self) -> list[str]:
        """Of all that it holds."""
        return sorted(meta["path"] for page in obstore.list(self.client()) for meta in page)

    def endpoint(self, host: str, port: int) -> str:
        return f"http://{host}:{port}"

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def credentials(self, *, wrong: bool = False) -> dict[str, str]: ...

    @abstractmethod
    def client(self) -> "S3Store | AzureStore | GCSStore": ...

    @abstractmethod
    def make_bucket(self) -> None:
        """Unless there is one."""

    def _launch(self) -> None:
        command = self.command()
        assert Path(command[0]).exists(), f"{command[0]} is missing: {self.remedy}"
        with (self.folder.parent / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(lambda: answers(*self.address()), self._process, command[0])
        self.make_bucket()

    remedy: ClassVar[str] = "pip install -r requirements-dev.lock"


class _S3Engine(ObjectEngine):
    def credentials(self, *, wrong: bool = False) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET[::-1] if wrong else SECRET,
        }

    def client(self) -> S3Store:
        with environment(self.credentials()):
            return S3Store(
                BUCKET,
                endpoint=self.endpoint(*self.address()),
                region="us-east-1",
                client_options=_FAST,
            )

    def make_bucket(self) -> None:
        import boto3

        with environment(self.credentials()):
            client = boto3.client(
                "s3", endpoint_url=self.endpoint(*self.address()), region_name="us-east-1"
            )
            with suppress(client.exceptions.BucketAlreadyExists):
                client.create_bucket(Bucket=BUCKET)


class RcloneEngine(_S3Engine):
    """Keeps connections open and checks signatures; knows no conditional writes."""

    def command(self) -> list[str]:
        return [
            str(_PROGRAMS / "rclone"),
            *("serve", "s3", str(self.folder), "--config", "/dev/null", "--no-cleanup"),
            *("--addr", f"127.0.0.1:{self.port}", "--auth-key", f"{KEY_ID},{SECRET}"),
        ]


class MotoEngine(_S3Engine):
    """Knows conditional writes; closes each connection and takes any credentials."""

    def command(self) -> list[str]:
        return [str(_PROGRAMS / "moto_server"), "-H", "127.0.0.1", "-p", str(self.port)]


class AzuriteEngine(ObjectEngine):
    """Azure's protocol, whose values come and go through obstore alone."""

    scheme: ClassVar[str] = "az"
    remedy: ClassVar[str] = f"npm install --prefix {sys.prefix}/node azurite@3.37.0"

    def command(self) -> list[str]:
        return [
            str(_AZURITE),
            *("--silent", "--disableTelemetry", "--skipApiVersionCheck"),
            *("--blobHost", "127.0.0.1", "--blobPort", str(self.port)),
            *("--location", str(self.folder)),
        ]

    def endpoint(self, host: str, port: int) -> str:
        return f"http://{host}:{port}/{AZURE_ACCOUNT}"

    def credentials(self, *, wrong: bool = False) -> dict[str, str]:
        secret = "AAAA" + AZURE_SECRET[4:] if wrong else AZURE_SECRET
        return {"AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": secret}

    def client(self) -> AzureStore:
        with environment(self.credentials()):
            return AzureStore(BUCKET, endpoint=self.endpoint(*self.address()), client_options=_FAST)

    def make_bucket(self) -> None:
        """By hand: obstore makes no containers."""
        date = formatdate(usegmt=True)
        fields = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
        path = f"/{AZURE_ACCOUNT}/{BUCKET}"
        signed = "PUT" + 12 * "\n" + fields + f"/{AZURE_ACCOUNT}{path}\nrestype:container"
        digest = hmac.digest(base64.b64decode(AZURE_SECRET), signed.encode(), "sha256")
        connection = HTTPConnection(*self.address(), timeout=10)
        with closing(connection):
            connection.request(
                "PUT",
                f"{path}?restype=container",
                headers={
                    "x-ms-date": date,
                    "x-ms-version": "2021-08-06",
                    "Authorization": f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}",
                },
            )
            assert connection.getresponse().status in {201, 409}
