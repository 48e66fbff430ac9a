"""The page in headless Chromium, before a server of the program's own."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.cli.processes import kvstrata
from tests.cli.traffic import NAMESPACE, find, prompt, save
from tests.page.model import MODEL, save_tokens
from tests.page.pages import HOSTILE, TOKEN, opened, shown

from kvstrata.server.page.guard import FILES

PATIENCE_MS = 120_000  # vLLM is imported meanwhile, on cores that others use


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


def test_transfers_and_latencies_follow_the_traffic(browser: Browser, place: Path) -> None:
    new = prompt("c", 8)
    with shown(place) as page_of, opened(browser, page_of.url) as page:
        disk, latencies = page.locator("[data-tier=disk]"), page.locator("#chart-latency .legend")
        expect(disk).to_contain_text("12 blocks of")
        expect(page.locator("#chart-moves")).not_to_contain_text("waiting for the first seconds")
        save(page_of.engine, new)
        assert find(page_of.engine, new) == 8
        for what in ("loaded by engines", "saved by engines"):
            figure = page.locator(".figure", has_text=what).locator("b")
            expect(figure).to_have_text(re.compile(r"^[1-9][\d.]* .?i?B/s$"))
        expect(disk).to_contain_text("20 blocks of")
        expect(disk).to_contain_text(re.compile(r"· write [\d.]+ ms"))
        expect(latencies).to_contain_text("disk write")
        kvstrata("clear", "--tier", "host", "--socket", str(page_of.socket))
        page_of.engine.wait([page_of.engine.prefetch(NAMESPACE, new)], 10)
        expect(disk).to_contain_text(re.compile(r"· read [\d.]+ ms"))
        expect(latencies).to_contain_text("disk read")
        names = page.locator("#chart-moves .legend span").all_inner_texts()
        for number, name in enumerate(("loaded", "saved", "promoted")):
            assert names[number].startswith(name)
            assert len(_heights(page, "moves", number)) > 1, name
        for number, name in enumerate(latencies.locator("span").all_inner_texts()):
            assert not name.startswith("disk") or _heights(page, "latency", number), name


def _heights(page: Page, chart: str, number: int) -> set[str]:
    """Of the points of a line."""
    drawn = page.locator(f"#chart-{chart} path").nth(number).get_attribute("d")
    assert drawn
    assert "NaN" not in drawn
    return set(re.findall(r"[ML]\S+ ([\d.]+)", drawn))


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


def test_a_file_of_prompts_is_warmed_and_its_progress_shown(browser: Browser, place: Path) -> None:
    """10,000 prompts that nobody has saved take long enough to look at."""
    known, unknown = list(range(200)), [[i, *range(63)] for i in range(10_000)]
    good, bad, long = place / "good.jsonl", place / "bad.jsonl", place / "long.jsonl"
    good.write_text("".join(f"{each}\n" for each in [known, *unknown]))
    bad.write_text("[1, 2]\n[3, 4\n")
    long.write_bytes(b" " * (FILES.most_bytes + 1))
    token = place / "token"
    token.write_text(TOKEN)
    with shown(place, "--admin", "--token-file", str(token)) as page_of:
        keys = save_tokens(page_of.engine, known)
        kvstrata("drain", "--socket", str(page_of.socket))
        kvstrata("clear", "--tier", "host", "--socket", str(page_of.socket))
        address = f"{page_of.url}#token={TOKEN}"
        with opened(browser, address, refused=(400, 413)) as page:
            row = page.locator("#namespaces tr", has_text=MODEL.hex())
            row.get_by_role("button", name="Warm").click()
            dialog, problem = page.get_by_role("dialog"), page.locator("#dialog-problem")
            for file, said in ((bad, "bad.jsonl:2 is no JSON"), (long, "split the file")):
                dialog.locator("input[type=file]").set_input_files(file)
                dialog.get_by_role("button", name="Warm").click()
                expect(problem).to_contain_text(said)
            expect(page.locator("#warming")).to_be_hidden()
            dialog.locator("input[type=file]").set_input_files(good)
            dialog.get_by_role("button", name="Warm").click()
            expect(dialog).to_contain_text("Reading good.jsonl")
            expect(dialog).to_be_hidden(timeout=PATIENCE_MS)
            warming = page.locator("#warming")
            expect(warming).to_contain_text(
                re.compile(r"good.jsonl: [1-9][\d,]* of 10,001 prompts, 3 of 10,003 blocks")
            )
            expect(warming.get_by_role("progressbar")).to_be_visible()
            expect(row.get_by_role("button", name="Warm")).to_be_disabled()
            expect(warming).to_contain_text(
                "good.jsonl: 10,001 of 10,001 prompts, 3 of 10,003 blocks in host memory; others",
                timeout=PATIENCE_MS,
            )
            expect(warming.get_by_role("progressbar")).to_be_hidden()
            expect(row.get_by_role("button", name="Warm")).to_be_enabled()
        assert page_of.engine.locate(MODEL, keys) == (3, 3)


def _use_the_verbs(page: Page) -> None:
    dialog = page.get_by_role("dialog")
    page.locator(".tree li").first.get_by_role("button", name="Pin").click()
    dialog.get_by_role("button", name="Pin").click()
    expect(page.locator("#holds")).to_contain_text("Pins: 4 blocks")
    page.locator("[data-tier=host]").get_by_role("button", name="Clear").click()
    expect(dialog).to_contain_text("host: 8 blocks, 512 KiB")
    expect(dialog).to_contain_text("In use or pinned, and kept: 4 blocks.")
    dialog.get_by_role("button", name="Cancel").click()
    expect(page.locator("[data-tier=host]")).to_contain_text("12 blocks of")
    page.locator("[data-tier=host]").get_by_role("button", name="Clear").click()
    dialog.get_by_role("button", name="Clear").click()
    expect(page.locator("[data-tier=host]")).to_contain_text("4 blocks of")
    page.locator("#holds").get_by_role("button", name="Unpin").click()
    expect(page.locator("#holds")).to_contain_text("Nothing is pinned.")
    page.locator(".tree li").nth(1).get_by_role("button", name="Warm").click()
    expect(page.locator("[data-tier=host]")).to_contain_text("8 blocks of")
    page.locator("#namespaces").get_by_role("button", name="Clear").click()
    expect(dialog).to_contain_text("disk: 12 blocks, 768 KiB")
    page.locator("#tier").select_option("host")
    expect(dialog).to_contain_text("host: 8 blocks, 512 KiB")
    expect(dialog).not_to_contain_text("disk: 12")
    dialog.get_by_role("button", name="Clear").click()
    expect(page.locator("[data-tier=host]")).to_contain_text("0 blocks of")
    expect(page.locator("[data-tier=disk]")).to_contain_text("12 blocks of")
    page.get_by_role("button", name="Drain…").click()
    dialog.get_by_role("button", name="Drain").click()
    expect(page.locator("#notice")).to_contain_text("Safe to stop.")
    page.get_by_role("button", name="Undo drain…").click()
    dialog.get_by_role("button", name="Undo").click()
    expect(page.locator("#notice")).to_be_hidden()
