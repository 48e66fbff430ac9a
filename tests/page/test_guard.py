"""Who gets what from the page: raw requests to the application, and to a real server behind it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.caches import ALICE, PATIENCE_SECONDS, config, eventually, keys, load, save
from tests.page.asking import HOST, TOKEN, Place, ask, order
from tests.server.harness import serving

from kvstrata.server.page.guard import Access, Guard
from kvstrata.server.page.sampler import Sampler

PROMPT = keys(1, 2, 3, 4)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    path = tmp_path / "s"
    with serving(config(8, tmp_path / "d"), path) as server:
        assert server.manager is not None
        save(server.manager, ALICE, PROMPT)
        load(server.manager, ALICE, PROMPT)
        sampler = Sampler(path, always_hottest=True)
        sampler.look()
        yield Place(server.manager, sampler, path)
        sampler.close()


def test_a_page_on_loopback_shows_and_lets_nobody_do_anything(place: Place) -> None:
    app = place.app()
    state = ask(app, "/api/state").value
    assert state["admin"] is False
    assert state["seen"]["report"]["tiers"][0]["used_blocks"] == 4
    assert [run["blocks"] for run in state["seen"]["hottest"]] == [4]
    for verb in ("clear", "pin", "unpin", "warm", "drain"):
        assert order(app, verb, {}).status == 403
    assert place.manager.operator.locate(ALICE, PROMPT)[0] == 4


@pytest.mark.parametrize("token", ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}"])
def test_with_a_token_nothing_is_shown_without_it(place: Place, token: str) -> None:
    app = place.app(TOKEN, admin=True)
    headers = {"authorization": token} if token else {}
    refused = ask(app, "/api/state", headers=headers)
    assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
    assert ask(app, f"/api/state?token={TOKEN}").status == 401  # a URL ends up in logs
    assert ask(app, "/").status == 200  # holds no data
    drain = {"authorization": token or "none"}
    assert order(app, "drain", {"wanted": True}, **drain).status == 401
    assert place.manager.stats().drain == "off"
    assert ask(app, "/api/state", headers={"authorization": f"Bearer {TOKEN}"}).status == 200


def test_admin_without_a_token_is_not_admin(place: Place) -> None:
    assert ask(place.app(None, admin=True), "/api/state").value["admin"] is False
    assert order(place.app(None, admin=True), "drain", {"wanted": True}).status == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1", "", "[::1]:1"])
def test_a_page_by_another_name_is_refused(place: Place, host: str) -> None:
    for path in ("/", "/api/state"):
        assert ask(place.app(), path, headers={"host": host}).status == 403


def test_other_sites_cannot_use_the_verbs(place: Place) -> None:
    app = place.app(TOKEN, admin=True)
    wanted = {"wanted": True}
    assert order(app, "drain", wanted, origin="http://evil.example").status == 403
    assert order(app, "drain", wanted, origin="null").status == 403
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert order(app, "drain", wanted, **form).status == 415
    assert order(app, "drain", wanted, **{"content-type": "text/plain"}).status == 415
    assert place.manager.stats().drain == "off"
    assert order(app, "drain", wanted, origin=f"http://{HOST}").status == 200
    assert place.manager.stats().drain != "off"


def test_headers_forbid_what_a_page_like_this_never_needs(place: Place) -> None:
    for path in ("/", "/page.js", "/api/state", "/nothing"):
        headers = ask(place.app(), path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers
    assert ask(place.app(), "/nothing").status == 404
    assert ask(place.app(), "/../app.py").status == 404


def test_verbs_do_what_they_say(place: Place) -> None:
    app = place.app(TOKEN, admin=True)
    assert place.manager._lower["disk"].drain(PATIENCE_SECONDS)
    block = {"namespace": ALICE.hex(), "last_block": PROMPT[1].hex()}
    pinned = order(app, "pin", block | {"ttl_seconds": 60}).value
    assert pinned["blocks"] == 2
    assert order(app, "unpin", {"number": pinned["number"]}).value == {"was_there": True}
    where = {"namespace": ALICE.hex(), "tier": "host"}
    dry = order(app, "clear", where | {"dry_run": True}).value["report"]
    assert dry["blocks"] == {"host": 4}
    assert place.manager.operator.locate(ALICE, PROMPT) == (4, 4)
    assert order(app, "clear", where | {"dry_run": False}).value["report"] == dry
    assert place.manager.operator.locate(ALICE, PROMPT) == (0, 4)
    whole = {"namespace": ALICE.hex(), "last_block": PROMPT[3].hex()}
    assert order(app, "warm", whole).status == 200
    eventually(
        lambda: place.manager.operator.locate(ALICE, PROMPT) == (4, 4), "nothing is brought up"
    )
    bearer = {"authorization": f"Bearer {TOKEN}"}

    def warming() -> Any:
        return ask(app, "/api/state", headers=bearer).value["warming"]

    eventually(lambda: bool(warming()["is_over"]), "it never ends")
    assert (warming()["host_blocks"], warming()["problem"]) == (4, None)


@pytest.mark.parametrize(
    ("verb", "value", "said"),
    [
        ("clear", {"namespace": "xyz", "tier": None, "dry_run": True}, "namespace"),
        ("clear", {"namespace": None, "tier": "tape", "dry_run": True}, "no tier 'tape'"),
        ("clear", {"namespace": None, "tier": None}, "dry_run"),
        ("clear", {"namespace": None, "tier": None, "dry_run": False, "all": 1}, "all"),
        ("pin", {"namespace": "00" * 16, "last_block": "00" * 32, "ttl_seconds": 0}, "ttl_seconds"),
        ("unpin", {"number": 0}, "number"),
        ("drain", {"wanted": "yes"}, "wanted"),
        ("drain", [], "array"),
        ("dance", {}, "no verb 'dance'"),
    ],
)
def test_wrong_orders_are_named(place: Place, verb: str, value: object, said: str) -> None:
    refused = order(place.app(TOKEN, admin=True), verb, value)
    assert refused.status == 400
    assert said in refused.value["problem"]
    assert place.manager.operator.locate(ALICE, PROMPT)[0] == 4


def test_bodies_are_bounded(place: Place) -> None:
    app = place.app(TOKEN, admin=True)
    assert order(app, "drain", {"wanted": True}, **{"content-length": "65537"}).status == 413
    assert order(app, "drain", {"wanted": True}, **{"content-length": "x"}).status == 413
    lying = order(app, "drain", {"x": "y" * 70_000}, **{"content-length": "10"})
    assert lying.status == 413


def test_requests_are_bounded_and_come_back(place: Place) -> None:
    now = 0.0
    inner = place.app()._app
    guard = Guard(inner, Access([HOST], None, admin=False), clock=lambda: now)
    statuses = [ask(guard, "/icon.svg").status for _ in range(202)]
    assert statuses == [200] * 200 + [429] * 2
    now = 1.0
    assert ask(guard, "/icon.svg").status == 200


def test_samples_are_sent_once(place: Place) -> None:
    app = place.app()
    place.sampler.look()
    first = ask(app, "/api/state").value["seen"]
    load(place.manager, ALICE, PROMPT)
    place.sampler.look()
    second = ask(app, f"/api/state?after={first['latest']}").value["seen"]
    (sample,) = second["samples"]
    assert (sample["lookups"], sample["looked_up"]["host"]) == (1, 4)
    assert ask(app, "/api/state?after=x").status == 400


def test_a_dead_server_is_told_and_a_new_one_is_found(tmp_path: Path) -> None:
    path = tmp_path / "s"
    sampler = Sampler(path)
    sampler.look()
    problem = sampler.seen().problem
    assert problem is not None
    assert "no server answers" in problem
    with serving(config(4), path):
        sampler.look()
        assert sampler.seen().problem is None
    sampler.look()
    assert sampler.seen().problem is not None
    with serving(config(4), path):
        sampler.look()
        sampler.look()
        assert sampler.seen().problem is None
    sampler.close()
