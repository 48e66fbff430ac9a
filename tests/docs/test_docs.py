"""Python of the documentation and its replays are run; where it points to is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), ROOT / "bench" / "README.md"])
REPLAY_BLOCK = re.compile(
    r"^```console\n\$ kvstrata (replay[^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL
)
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(#[^)\s]*)?\)")


def python_blocks() -> list[tuple[str, str]]:
    return [
        (f"{page.name}-{number}", block)
        for page in PAGES
        for number, block in enumerate(PYTHON_BLOCK.findall(page.read_text()), start=1)
    ]


@pytest.mark.parametrize("block", [pytest.param(b, id=name) for name, b in python_blocks()])
def test_a_python_block_of_the_documentation_runs(block: str, tmp_path: Path) -> None:
    done = subprocess.run(  # noqa: PLW1510 - the assertion shows what it printed
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "shown"), REPLAY_BLOCK.findall((ROOT / "docs" / "sizing.md").read_text())
)
def test_a_replay_prints_what_the_sizing_guide_shows(
    command: str, shown: str, tmp_path: Path
) -> None:
    done = subprocess.run(  # noqa: PLW1510 - the assertion shows what it printed
        [sys.executable, "-m", "kvstrata", *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()


def anchors(page: Path) -> set[str]:
    """As GitHub names the headings of *page*."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.*)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(words.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target, anchor in LINK.findall(text):
        if "://" in target:
            continue
        file = page.parent / target if target else page
        is_page = file.suffix == ".md" and file.exists()
        if not file.exists() or (anchor and is_page and anchor[1:] not in anchors(file)):
            broken.append(f"{target}{anchor}")
    assert broken == []


def test_every_page_is_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in ROOT.glob("docs/*.md") if f"docs/{page.name}" not in readme] == []


def named_tests(page: str) -> list[tuple[str, str]]:
    """Files and names, if any; in the requirements a name alone is of the file named before it."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found: list[tuple[str, str]] = []
    for file, name, alone in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`|`(test_\w+)`", text):
        if file or page == "requirements":
            found.append((file or found[-1][0], name or alone))
    return found


@pytest.mark.parametrize(("page", "at_least"), [("requirements", 100), ("compatibility", 15)])
def test_every_test_that_a_page_names_exists(page: str, at_least: int) -> None:
    named = named_tests(page)
    assert len(named) > at_least
    missing = [
        (file, name)
        for file, name in named
        if not (ROOT / file).exists()
        or (name and not re.search(rf"(?:def|class) {name}\(", (ROOT / file).read_text()))
    ]
    assert missing == []
    if page == "requirements":
        assert [file for file, name in named if not name] == []


def test_every_file_that_the_requirements_name_exists() -> None:
    rows = (ROOT / "docs" / "requirements.md").read_text().splitlines()
    cells = [row.split("|")[3] for row in rows if row.startswith(("| R", "| G"))]
    src = ROOT / "src" / "kvstrata"
    missing = []
    for cell in cells:
        folder = src
        for name in re.findall(r"`([^`]+)`", cell):
            path = ROOT / name if name.startswith("docs/") else src / name
            if not path.exists():
                path = folder / name  # a second file of a cell lies beside the first
            folder = path.parent
            if not path.exists():
                missing.append(name)
    assert missing == []


def test_every_number_of_the_requirements_has_a_row() -> None:
    """And every row says what shows it: a test, or why there is none."""
    last = {"R1": 36, "R2": 27, "R3": 13, "R4": 22, "R5": 24}
    wanted = {f"{part}.{n}" for part, numbers in last.items() for n in range(1, numbers + 1)}
    wanted |= {f"R4.15{letter}" for letter in "bcd"} | {f"G{n}" for n in range(1, 11)}
    page = (ROOT / "docs" / "requirements.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith(("| R", "| G"))]
    assert {n for row in rows for n in row[1].replace(",", " ").split()} == wanted
    assert [row[1] for row in rows if not re.search(r"`tests/[\w/]+\.py", row[4])] == []
    assert {len(row) for row in rows} == {6}
