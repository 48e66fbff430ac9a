"""Raw requests to the page's application, before a real server."""

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvstrata.cli.prompt_file import read_keys_apart
from kvstrata.manager.manager import KVManager
from kvstrata.server.page.app import make_app
from kvstrata.server.page.guard import Access, Guard
from kvstrata.server.page.sampler import Sampler
from kvstrata.server.page.verbs import Verbs

TOKEN = "a-token-of-more-than-16"
HOST = "127.0.0.1:8765"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def value(self) -> Any:
        return json.loads(self.body)


class Place(NamedTuple):
    manager: KVManager
    sampler: Sampler
    path: Path

    def app(self, token: str | None = None, *, admin: bool = False) -> Guard:
        self.sampler.look()
        verbs = Verbs(self.path, partial(read_keys_apart, tokenizer=None))
        return make_app(self.sampler, verbs, Access([HOST], token, admin=admin))


def ask(
    app: Guard,
    path: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
) -> Answer:
    said = {"host": HOST} | dict(headers or {})
    target, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": target,
        "raw_path": target.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(k.encode(), v.encode()) for k, v in said.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8765),
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    found = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return Answer(sent[0]["status"], found, b"".join(m.get("body", b"") for m in sent[1:]))


def order(app: Guard, verb: str, value: object, **headers: str) -> Answer:
    body = json.dumps(value).encode()
    said = {
        "authorization": f"Bearer {TOKEN}",
        "content-type": "application/json",
        "content-length": str(len(body)),
    }
    return ask(app, f"/api/{verb}", method="POST", headers=said | headers, body=body)
