"""The page in headless Chromium, before a server of the program's own."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.cli.processes import kvstrata, running, until
from tests.cli.traffic import NAMESPACE, engine, find, prompt, save, serving
from tests.ports import free_port

from kvstrata.server.client import ManagerClient

TOKEN = "0123456789abcdef0123"
HOSTILE = "<img src=x onerror=\"document.title='stolen'\"><script>1</script>"


class Shown(NamedTuple):
    url: str
    socket: Path
    engine: ManagerClient
    log: Path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "scripts/test_servers.sh installs Chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def shown(place: Path, *arguments: str) -> Iterator[Shown]:
    """A server with a disk and 12 blocks of two prompts, and the page of it."""
    address = f"127.0.0.1:{free_port()}"
    disk = f"{place / 'disk'}:64MiB"
    log = place / "page.log"
    with (
        serving(place, "--host-size", "4MiB", "--disk", disk) as path,
        engine(path, HOSTILE[:256], model=HOSTILE) as client,
    ):
        save(client, prompt("a", 8))
        save(client, [*prompt("a", 4), *prompt("b", 4)])
        for _ in range(3):
            find(client, prompt("a", 8))
        find(client, [*prompt("a", 4), *prompt("b", 4)])
        with running(
            "page", "--socket", str(path), "--listen", address, *arguments, log=log
        ) as process:
            until(lambda: "is shown at" in log.read_text() or process.poll() is not None, 30, log)
            assert process.poll() is None, log.read_text()
            yield Shown(f"http://{address}/", path, client, log)
        assert TOKEN not in log.read_text()


@contextmanager
def opened(browser: Browser, url: str, *, width: int = 1280) -> Iterator[Page]:
    """The page; fails if the browser has anything to complain about."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    context.set_default_timeout(20_000)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type != "info" else None)
    page.on("pageerror", lambda e: complaints.append(str(e)))
    ours = url.partition("#")[0]
    page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(ours) else None)
    page.goto(url)
    yield page
    context.close()
    assert [each for each in complaints if "status of 401" not in each] == []


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path


def test_figures_are_those_of_stats_and_hostile_names_are_text(
    browser: Browser, place: Path
) -> None:
    with shown(place) as page_of, opened(browser, page_of.url) as page:
        expect(page.locator("#status")).to_have_text("live")
        expect(page.locator("#socket")).to_have_text(str(page_of.socket))
        stats = kvstrata("stats", "--socket", str(page_of.socket), "--json")
        (server,) = json.loads(stats.stdout)["servers"]
        host = server["report"]["tiers"][0]
        assert host["used_blocks"] == 12
        expect(page.locator("[data-tier=host]")).to_contain_text("12 blocks of 64.0 KiB")
        expect(page.locator("[data-tier=host]")).to_contain_text("768 KiB of 4.0 MiB")
        expect(page.locator("[data-tier=disk]")).to_contain_text("breaker closed")

        runs = page.locator(".tree li")
        expect(runs).to_have_count(3)
        expect(runs.nth(0)).to_contain_text("blocks 1\u20134")
        expect(runs.nth(0)).to_contain_text("4 hits")
        expect(runs.nth(0)).to_contain_text("2 go on from it")
        expect(runs.nth(1)).to_contain_text("blocks 5\u20138")
        expect(runs.nth(1)).to_contain_text("3 hits")
        assert runs.nth(1).get_attribute("aria-level") == "2"

        namespaces = page.locator("#namespaces")
        expect(namespaces.locator("b")).to_have_text(HOSTILE)
        expect(namespaces).to_contain_text(NAMESPACE.hex())
        expect(page.locator("#holds")).to_contain_text(HOSTILE)
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "KVStrata"

        page.locator("#counters").locator("xpath=ancestor::details").evaluate("e => e.open = true")
        for name, value in server["report"]["counters"].items():
            if value and "lookup" in name:
                expect(page.locator("#counters tr", has_text=name).first).to_contain_text(
                    f"{value:,}"
                )
        assert page.get_by_role("button", name=re.compile("Clear|Pin|Warm|Drain")).count() == 0


def test_charts_follow_the_traffic(browser: Browser, place: Path) -> None:
    with shown(place) as page_of, opened(browser, page_of.url) as page:
        expect(page.locator("#chart-hits .grid").first).to_be_attached()
        for _ in range(4):
            assert find(page_of.engine, prompt("a", 8)) == 8
            page.wait_for_timeout(600)
        expect(page.locator("#figures")).to_contain_text("100 %")
        drawn = page.locator("#chart-hits path").first.get_attribute("d")
        assert drawn
        assert "NaN" not in drawn
        page.locator("#chart-hits svg").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#chart-hits .cross")).to_be_attached()


def test_it_is_readable_on_a_telephone_and_by_night(browser: Browser, place: Path) -> None:
    with shown(place) as page_of, opened(browser, page_of.url, width=360) as page:
        expect(page.locator(".tree li").first).to_be_visible()
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 360
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.get_by_role("button", name="Theme: system").click()
        page.get_by_role("button", name="Theme: light").click()
        expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_verbs_need_the_token_and_show_first_what_they_would_do(
    browser: Browser, place: Path
) -> None:
    token = place / "token"
    token.write_text(TOKEN + "\n")
    with shown(place, "--admin", "--token-file", str(token)) as page_of:
        with opened(browser, page_of.url) as page:
            dialog = page.get_by_role("dialog")
            expect(dialog).to_contain_text("needs its token")
            expect(page.locator("#figures")).to_be_empty()
            page.locator("#token").fill("wrong-wrong-wrong-wrong")
            page.get_by_role("button", name="OK").click()
            expect(dialog.locator(".problem")).to_contain_text("a token is needed")
            page.locator("#token").fill(TOKEN)
            page.get_by_role("button", name="OK").click()
            expect(dialog).to_be_hidden()
            expect(page.locator("#status")).to_have_text("live")
            _use_the_verbs(page)
        with opened(browser, f"{page_of.url}#token={TOKEN}") as page:
            expect(page.locator("#status")).to_have_text("live")
            assert TOKEN not in page.url


def _use_the_verbs(page: Page) -> None:
    dialog = page.get_by_role("dialog")
    page.locator(".tree li").first.get_by_role("button", name="Pin").click()
    dialog.get_by_role("button", name="Pin").click()
    expect(page.locator("#holds")).to_contain_text("Pins: 4 blocks")
    page.locator("[data-tier=host]").get_by_role("button", name="Clear").click()
    expect(dialog).to_contain_text("host: 8 blocks, 512 KiB")
    expect(dialog).to_contain_text("In use, and kept: 4 blocks.")
    dialog.get_by_role("button", name="Cancel").click()
    expect(page.locator("[data-tier=host]")).to_contain_text("12 blocks of")
    page.locator("[data-tier=host]").get_by_role("button", name="Clear").click()
    dialog.get_by_role("button", name="Clear").click()
    expect(page.locator("[data-tier=host]")).to_contain_text("4 blocks of")
    page.locator("#holds").get_by_role("button", name="Unpin").click()
    expect(page.locator("#holds")).to_contain_text("Nothing is pinned.")
    page.locator(".tree li").nth(1).get_by_role("button", name="Warm").click()
    expect(page.locator("[data-tier=host]")).to_contain_text("8 blocks of")
    page.get_by_role("button", name="Drain…").click()
    dialog.get_by_role("button", name="Drain").click()
    expect(page.locator("#notice")).to_contain_text("Safe to stop.")
    page.get_by_role("button", name="Undo drain…").click()
    dialog.get_by_role("button", name="Undo").click()
    expect(page.locator("#notice")).to_be_hidden()
