"""`kvstrata top`, in a terminal of its own."""

import json
from pathlib import Path

import pytest
from tests.cli.processes import kvstrata
from tests.cli.terminal import Terminal, terminal
from tests.cli.traffic import engine, find, prompt, save, serving


@pytest.mark.parametrize(
    "key", [b"q", b"\x03", b"\x04", b""], ids=["q", "ctrl-c", "ctrl-d", "terminated"]
)
def test_it_follows_the_traffic_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, key: bytes
) -> None:
    with serving(tmp_path, "--host-size", "4MiB") as path, engine(path) as client:
        save(client, prompt("a", 8))
        with terminal("top", "--socket", str(path), "--interval", "0.3") as screen:
            screen.until(lambda: screen.shows("8 blocks") and screen.shows("tiny"))
            assert screen.shows("512.0 KiB")
            assert screen.shows("hit rate -")
            find(client, prompt("a", 8))
            screen.until(lambda: screen.shows("100.0%") and screen.shows("hottest prompts"))
            assert screen.shows(prompt("a", 8)[-1].hex()[:12])
            screen.type(key) if key else screen.process.terminate()
            screen.until(screen.ended)
            screen.read(0.2)
            assert screen.process.returncode == 0
            assert screen.settings_now() == screen.settings
            assert screen.seen.rstrip().endswith((b"\x1b[?1049l\x1b[?25h", b"\x1b[?25h\x1b[?1049l"))


def test_transfers_latencies_and_what_prompts_share_are_shown(tmp_path: Path) -> None:
    tiers = ("--host-size", "4MiB", "--disk", f"{tmp_path}/d:64MiB")
    with serving(tmp_path, *tiers) as path, engine(path) as client:
        save(client, prompt("a", 8))
        with terminal("top", "--socket", str(path), "--interval", "0.3") as screen:
            screen.until(lambda: screen.matches("loaded 0 B/s  saved 0 B/s"))
            save(client, [*prompt("a", 4), *prompt("b", 4)])
            find(client, prompt("a", 8))
            find(client, [*prompt("a", 4), *prompt("b", 4)])
            moved = r"loaded [1-9][\d.]* \wiB/s  saved [1-9][\d.]* \wiB/s"
            screen.until(lambda: screen.matches(moved))
            screen.until(lambda: screen.matches(r"disk .* 12 blocks .*write \d+\.\d ms"))
            shared, *ends = (
                prompt(*each)[-1].hex()[:12] for each in (("a", 4), ("a", 8), ("b", 4))
            )
            screen.until(lambda: screen.matches(f"^{shared} +2 +4 "))
            for end in ends:
                assert screen.matches(f"^  └ {end} +1 +4 ")
            screen.type(b"q")
            screen.until(screen.ended)


def test_it_is_drawn_anew_when_the_terminal_changes_its_size(tmp_path: Path) -> None:
    with serving(tmp_path, "--host-size", "4MiB") as path, engine(path) as client:
        save(client, prompt("a", 8))
        with terminal("top", "--socket", str(path), "--interval", "60") as screen:
            screen.until(lambda: screen.shows("tiny"))
            while screen.read(0.5):  # the whole picture
                pass
            screen.resize(60, 12)
            screen.until(lambda: screen.shows("kvstrata top"))
            screen.type(b"q")
            screen.until(screen.ended)
            assert screen.process.returncode == 0


def test_a_server_that_ends_is_told_and_its_successor_is_found(tmp_path: Path) -> None:
    with serving(tmp_path, "--host-size", "4MiB", "--block-bytes", "64KiB") as path:
        screen = Terminal("top", "--socket", str(path), "--interval", "0.3")
        screen.until(lambda: screen.shows("0 blocks"))
    try:
        screen.until(lambda: screen.shows("no server answers") or screen.shows("is lost"))
        with serving(tmp_path, "--host-size", "4MiB", "--block-bytes", "64KiB"):
            screen.until(lambda: not screen.shows("no server") and not screen.shows("is lost"))
            screen.type(b"q")
            screen.until(screen.ended)
    finally:
        screen.close()


def test_once_prints_one_picture_and_json(tmp_path: Path) -> None:
    with serving(tmp_path, "--host-size", "4MiB") as path, engine(path) as client:
        save(client, prompt("a", 8))
        find(client, prompt("a", 8))
        once = ("top", "--socket", str(path), "--once", "--interval", "0.2")
        shown = kvstrata(*once)
        as_json = kvstrata(*once, "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "512.0 KiB" in shown.stdout
    assert "\x1b" not in shown.stdout
    value = json.loads(as_json.stdout)
    assert value["report"]["tiers"][0]["used_blocks"] == 8
    assert [run["hits"] for run in value["hottest"]] == [1]
    assert value["activity"]["hit_rate"] is None


def test_wrong_uses_are_named(tmp_path: Path) -> None:
    absent = kvstrata("top", "--socket", str(tmp_path / "none"), "--once")
    assert (absent.returncode, "no server answers" in absent.stderr) == (1, True)
    no_terminal = kvstrata("top", "--socket", str(tmp_path / "none"))
    assert (no_terminal.returncode, "give --once" in no_terminal.stderr) == (2, True)
    live_json = kvstrata("top", "--json")
    assert (live_json.returncode, "--json prints once" in live_json.stderr) == (2, True)


def test_without_a_server_or_an_engine_it_says_what_to_start(tmp_path: Path) -> None:
    nowhere = kvstrata("top", "--once", "--socket", f"{tmp_path}/none")
    assert (nowhere.returncode, nowhere.stdout) == (1, "")
    assert nowhere.stderr == (
        f"error: no server answers at {tmp_path}/none: No such file or directory\n"
        f"  hint: start one with 'kvstrata server --socket {tmp_path}/none', or name the socket of "
        "another\n"
    )
    with serving(tmp_path, "--host-size", "4MiB") as path:
        waiting = kvstrata("top", "--once", "--socket", str(path))
    assert (waiting.returncode, waiting.stdout) == (1, "")
    assert waiting.stderr == (
        f"error: the server at {path} waits for its first engine, and has nothing to show yet\n"
        f"  hint: start one with 'kvstrata serve MODEL --attach {path}'\n"
    )
