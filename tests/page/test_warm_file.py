"""Files of prompts that are sent to the page: requests to the application, before a real server."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.caches import ALICE, PATIENCE_SECONDS, config, eventually, save
from tests.page.asking import HOST, TOKEN, Answer, Place, ask
from tests.page.model import MODEL, PARTS
from tests.server.harness import engine, serving

from kvstrata.cli.prompt_file import read_prompts
from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.prompt_keys import PromptKeys
from kvstrata.server.page import app as page_app
from kvstrata.server.page.guard import Guard
from kvstrata.server.page.sampler import Sampler

LONG, SHORT = [(7 * i) % 1000 for i in range(200)], [(3 * i) % 1000 for i in range(70)]
LIMIT = 16 << 20
BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Four blocks of two prompts are on disk alone."""
    path = tmp_path / "s"
    with serving(config(8, tmp_path / "d"), path) as server:
        assert server.manager is not None
        client = engine(path)
        client.register_namespace(MODEL, PARTS)
        for tokens in (LONG, SHORT):
            save(server.manager, MODEL, PromptKeys(PARTS).of(tokens))
        assert server.manager._lower["disk"].drain(PATIENCE_SECONDS)
        server.manager.operator.clear(MODEL, "host")
        sampler = Sampler(path)
        yield Place(server.manager, sampler, path)
        sampler.close()
        client.close()


def send(app: Guard, content: bytes, query: str | None = None, **headers: str) -> Answer:
    said = BEARER | {"content-type": "application/jsonl", "content-length": str(len(content))}
    where = f"namespace={MODEL.hex()}&name=prompts.jsonl" if query is None else query
    return ask(app, f"/api/warm-file?{where}", method="POST", headers=said | headers, body=content)


def warming(app: Guard) -> Any:
    return ask(app, "/api/state", headers=BEARER).value["warming"]


def test_prompts_of_a_file_are_brought_up(place: Place) -> None:
    app = place.app(TOKEN, admin=True)
    content = f"{LONG}\n\n{SHORT}\n{[1] * 64}\n".encode()
    begun = send(app, content)
    assert (begun.status, begun.value) == (200, {"prompts": 3, "blocks": 5})
    eventually(lambda: bool(warming(app)["is_over"]), "it never ends")
    assert warming(app) == {
        "namespace": MODEL.hex(),
        "name": "prompts.jsonl",
        "prompts": 3,
        "ended_prompts": 3,
        "host_blocks": 4,  # one is nowhere
        "asked_blocks": 5,
        "is_over": True,
        "problem": None,
    }
    for tokens, blocks in ((LONG, 3), (SHORT, 1)):
        keys = PromptKeys(PARTS).of(tokens)
        assert place.manager.operator.locate(MODEL, keys) == (blocks, blocks)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[1, 2]\n\n[3, 4", "prompts.jsonl:3 is no JSON"),
        (b"[1, 2]\r\n\xff\r\n", "prompts.jsonl:2 is no JSON"),
        (b"[" * 100_000, "prompts.jsonl:1 is no JSON"),
        (b'[1]\n{"prompt": [1]}', "prompts.jsonl:2 is neither a list of token ids nor a text"),
        (b"[1]\n[1, -2]", "prompts.jsonl:2 is neither"),
        (b"[1]\n[true]", "prompts.jsonl:2 is neither"),
        (b'[1]\n"a text"', "there are texts among the prompts"),
        (b"\n \n", "prompts.jsonl holds no prompt"),
        (b"", "prompts.jsonl holds no prompt"),
    ],
)
def test_wrong_files_are_refused_as_by_the_command(place: Place, content: bytes, said: str) -> None:
    app = place.app(TOKEN, admin=True)
    refused = send(app, content)
    with pytest.raises(ConfigError) as e:
        read_prompts(content, "prompts.jsonl", PARTS, None)
    assert (refused.status, refused.value) == (400, {"problem": str(e.value)})
    assert said in refused.value["problem"]
    assert warming(app) is None


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("name=x", "namespace"),
        ("namespace=xyz&name=x", "namespace"),
        (f"namespace={MODEL.hex()}", "name"),
        (f"namespace={MODEL.hex()}&name=", "name"),
        (f"namespace={MODEL.hex()}&name={'x' * 256}", "name"),
        (f"namespace={MODEL.hex()}&name=x&tokenizer=y", "tokenizer"),
    ],
)
def test_wrong_questions_are_named(place: Place, query: str, said: str) -> None:
    refused = send(place.app(TOKEN, admin=True), b"[1]", query)
    assert refused.status == 400
    assert said in refused.value["problem"]


def test_a_namespace_that_says_nothing_is_named(place: Place) -> None:
    refused = send(place.app(TOKEN, admin=True), b"[1]", f"namespace={ALICE.hex()}&name=x")
    assert refused.status == 400
    assert "does not say its hash_algorithm" in refused.value["problem"]


def test_files_need_what_verbs_need(place: Place) -> None:
    assert send(place.app(), b"[1]").status == 403
    assert send(place.app(TOKEN), b"[1]").status == 403
    app = place.app(TOKEN, admin=True)
    assert send(app, b"[1]", authorization="Bearer wrong").status == 401
    assert send(app, b"[1]", origin="http://evil.example").status == 403
    for media_type in ("application/json", "text/plain", "multipart/form-data; boundary=x"):
        assert send(app, b"[1]", **{"content-type": media_type}).status == 415
    assert ask(app, "/api/warm-file", headers=BEARER).status == 405


def test_files_are_bounded_and_the_limit_is_named(place: Place) -> None:
    app = place.app(TOKEN, admin=True)
    said = f"at most {LIMIT:,} bytes, with its length: split the file, or use kvstrata warm"
    for length in (str(LIMIT + 1), "x", ""):
        refused = send(app, b"[1]", **{"content-length": length})
        assert refused.status == 413
        assert said in refused.body.decode()
    lying = send(app, b" " * (LIMIT + 1), **{"content-length": "10"})
    assert (lying.status, said in lying.body.decode()) == (413, True)
    assert "holds no prompt" in send(app, b" " * LIMIT).value["problem"]


async def _send_slowly(
    app: Guard, receive: Callable[[], Awaitable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    headers = BEARER | {"host": HOST, "content-type": "application/jsonl", "content-length": "9"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/warm-file",
        "query_string": f"namespace={MODEL.hex()}&name=x".encode(),
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
    }
    sent: list[Any] = []

    async def keep(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, keep)
    return sent


def test_a_file_whose_sender_goes_away_is_forgotten(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = place.app(TOKEN, admin=True)

    async def half() -> dict[str, Any]:
        return pieces.pop(0)

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    pieces: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"[1,", "more_body": True},
        {"type": "http.disconnect"},
    ]
    asyncio.run(_send_slowly(app, half))
    monkeypatch.setattr(page_app, "_BODY_SECONDS", 0.05)
    slow = asyncio.run(_send_slowly(app, never))
    assert slow[0]["status"] == 408
    assert warming(app) is None
    assert "holds no prompt" in send(app, b"").value["problem"]


def test_one_file_is_read_at_a_time(place: Place) -> None:
    app = place.app(TOKEN, admin=True)
    content = json.dumps(LONG).encode()

    async def both() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        is_read = asyncio.Event()

        async def slow() -> dict[str, Any]:
            await is_read.wait()
            return {"type": "http.request", "body": content, "more_body": False}

        first = asyncio.create_task(_send_slowly(app, slow))
        await asyncio.sleep(0)  # it has begun
        second = await _send_slowly(app, slow)
        is_read.set()
        return await first, second

    first, second = asyncio.run(both())
    assert (first[0]["status"], second[0]["status"]) == (200, 429)
    assert b"another file is being read" in second[1]["body"]
    eventually(lambda: bool(warming(app)["is_over"]), "it never ends")
    assert warming(app)["host_blocks"] == 3
