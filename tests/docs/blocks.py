"""The code blocks of the documentation, and the command lines in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted(
    [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), ROOT / "bench" / "README.md"]
)
_FENCED: Final = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INDENTED: Final = re.compile(r"(?:\A|\n\n)((?:    .*\n(?:\n(?=    ))?)+)")
_PROMPT: Final = re.compile(r"^(?:\w*\$|#) +")
_ASSIGNMENT: Final = re.compile(r"[A-Z][A-Z0-9_]*=")


@dataclass(frozen=True)
class Block:
    page: Path
    language: str  # empty where the page says none
    text: str

    def __str__(self) -> str:
        first = self.text.strip().splitlines()[0]
        return f"{self.page.name}: {first[:60]}"


@dataclass(frozen=True)
class Command:
    page: Path
    environment: tuple[tuple[str, str], ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        folder, program = self.page.parent.name, " ".join(self.words)
        return f"{folder}/{self.page.name}: {program}"


def blocks() -> Iterator[Block]:
    """Those with a fence, and those that are commands because they are indented."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for _, language, inside in _FENCED.findall(text):
            yield Block(page, language, inside)
        for inside in _INDENTED.findall(_FENCED.sub("", text)):
            lines = [line[4:] for line in inside.splitlines()]
            if lines[0][:1] not in {" ", "-", "*"} and not re.match(r"\d+\. ", lines[0]):
                yield Block(page, "console", "".join(f"$ {line}\n" for line in _joined(lines)))


def _joined(lines: list[str]) -> Iterator[str]:
    """Commands without a prompt, each with the lines that go on from it."""
    pending = ""
    for line in lines:
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1]
        elif pending.strip():
            yield pending
            pending = ""


def commands() -> Iterator[Command]:
    for block in blocks():
        if block.language == "console":
            for line in _lines(block.text):
                yield from _split(block.page, line)


def _lines(text: str) -> Iterator[str]:
    """The commands of a console block, without what they print."""
    pending: str | None = None
    for line in text.splitlines():
        if pending is None:
            if not _PROMPT.match(line):
                continue
            pending = _PROMPT.sub("", line)
        else:
            pending += "\n" + line
        if not _goes_on(pending):
            yield pending
            pending = None
    assert pending is None, f"a command does not end: {pending}"


def _goes_on(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:  # a quotation is open, or a backslash is the last
        return True
    return text.endswith("\\")


def _split(page: Path, line: str) -> Iterator[Command]:
    """The commands of one line: before and behind a pipe, `&&` and `;`."""
    lexer = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word and not set(word) <= set("|&;"):
            words.append(word)
        elif words:
            yield _command(page, words)
            words = []


def _command(page: Path, words: list[str]) -> Command:
    environment = []
    while words and _ASSIGNMENT.match(words[0]):
        name, _, value = words[0].partition("=")
        environment.append((name, value))
        words = words[1:]
    return Command(page, tuple(environment), tuple(words))
