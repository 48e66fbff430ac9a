"""Commands that are given within `kvstrata top`."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.processes import kvstrata
from tests.cli.terminal import Terminal, terminal
from tests.cli.traffic import NAMESPACE, engine, prompt, save, serving

from kvstrata.cli.top_verbs import Line


@contextmanager
def top(place: Path, *tiers: str) -> Iterator[Terminal]:
    """One that shows eight blocks."""
    with serving(place, "--host-size", "4MiB", *tiers) as path, engine(path) as client:
        save(client, prompt("a", 8), request="chat-1")
        with terminal("top", "--socket", str(path), "--interval", "0.3") as screen:
            screen.until(lambda: screen.matches(r"host .* 8 blocks"))
            yield screen


def give(screen: Terminal, typed: str) -> str:
    """What the command has said."""
    before = len(screen.seen)
    screen.type(typed.encode() + b"\r")
    screen.until(lambda: b"any key goes back" in screen.seen[before:])
    return screen.seen[before:].partition(b"$ kvstrata ")[2].decode()


def back(screen: Terminal) -> None:
    before = len(screen.seen)
    screen.type(b" ")
    screen.until(lambda: b"q quits" in screen.seen[before:])


def test_each_verb_is_run_on_the_server_that_is_shown(tmp_path: Path) -> None:
    with top(tmp_path, "--disk", f"{tmp_path}/d:64MiB") as screen:
        said = give(screen, "p--request chat-1 --ttl 60")
        assert ": 8 blocks for 60 seconds" in said
        back(screen)
        screen.until(lambda: screen.shows("pinned 8 blocks"))
        give(screen, "u1")
        back(screen)
        screen.until(lambda: screen.shows("pinned 0 blocks"))
        assert "8 of 8 blocks are in host memory" in give(screen, "w--request chat-1")
        back(screen)
        assert "safe to stop: all blocks are written" in give(screen, "d")
        back(screen)
        screen.until(lambda: screen.shows("drained: safe to stop"))
        said = give(screen, f"c--namespace {NAMESPACE.hex()} --dry-run")
        assert "would be cleared" in said
        back(screen)
        screen.until(lambda: screen.matches(r"host .* 8 blocks"))
        give(screen, f"c--namespace {NAMESPACE.hex()}")
        back(screen)
        screen.until(lambda: screen.matches(r"host .* 0 blocks"))
        screen.type(b"q")
        screen.until(screen.ended)
        assert screen.process.returncode == 0
        assert screen.settings_now() == screen.settings


def test_what_is_typed_is_shown_can_be_mended_and_left(tmp_path: Path) -> None:
    with top(tmp_path) as screen:
        screen.type(b"c")
        screen.until(lambda: screen.shows("kvstrata clear █"))
        screen.type(b"--quit")
        screen.until(lambda: screen.shows("kvstrata clear --quit█"))
        screen.type(b"\x1b[A")  # an arrow
        screen.type(b"\x7f" * 6)
        screen.until(lambda: screen.shows("kvstrata clear █"))
        screen.type(b"\x1b")
        screen.until(lambda: screen.shows("q quits"))
        assert "nothing says what to clear" in give(screen, "c")
        back(screen)
        screen.until(lambda: screen.matches(r"host .* 8 blocks"))
        screen.type(b"c--tier 'host\r")
        screen.until(lambda: screen.shows("kvstrata clear --tier 'host█  No closing quotation"))
        screen.type(b" " * 80)
        screen.until(lambda: screen.shows("█"))
        screen.type(b"\x1b")
        screen.until(lambda: screen.shows("q quits"))
        screen.type(b"xq")
        screen.until(screen.ended)
        assert screen.process.returncode == 0


def test_ctrl_c_ends_the_command_and_not_the_picture(tmp_path: Path) -> None:
    with top(tmp_path) as screen:
        screen.type(b"w-\r")  # prompts of standard input, which has no end
        screen.until(lambda: b"$ kvstrata warm -" in screen.seen)
        while screen.read(2.0):  # until it waits for them
            pass
        screen.type(b"\x03")
        screen.until(lambda: b"any key goes back" in screen.seen)
        back(screen)
        screen.process.send_signal(signal.SIGTERM)
        screen.until(screen.ended)
        assert screen.process.returncode == 0
        assert screen.settings_now() == screen.settings


@pytest.mark.parametrize("typed", ["w-", "d"], ids=["a command", "a key"])
def test_sigterm_ends_it_whatever_it_waits_for(tmp_path: Path, typed: str) -> None:
    with top(tmp_path) as screen:
        if typed == "d":
            give(screen, typed)
        else:
            screen.type(typed.encode() + b"\r")
            screen.until(lambda: b"$ kvstrata warm -" in screen.seen)
        screen.process.terminate()
        screen.until(screen.ended)
        assert screen.process.returncode == 0
        assert screen.settings_now() == screen.settings


def test_a_line_is_taken_apart_as_a_shell_does() -> None:
    line = Line()
    assert line.feed("x\x1bd") is None
    assert not line.verb
    assert line.feed("p--keys-from 'my keys' --ttl 5\r") == [
        "pin", "--keys-from", "my keys", "--ttl", "5"
    ]  # fmt: skip
    line = Line()
    line.feed("u1")
    line.feed("\x1bd\x1b[A2")  # Alt-d, an arrow
    assert (line.verb, line.typed) == ("unpin", "12")
    line.feed("3\x1b")
    assert (line.verb, line.typed) == ("", "")
    assert line.feed("\r") is None
    line.feed("xq")
    assert line.quits


def test_help_names_the_keys() -> None:
    done = kvstrata("top", "--help")
    assert "clear, pin, unpin, warm and drain" in " ".join(done.stdout.split())
