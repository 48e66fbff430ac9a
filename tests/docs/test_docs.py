"""What the documentation shows is run; where it points to is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")])
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")


def python_blocks() -> list[tuple[str, str]]:
    return [
        (f"{page.name}-{number}", block)
        for page in PAGES
        for number, block in enumerate(PYTHON_BLOCK.findall(page.read_text()), start=1)
    ]


@pytest.mark.parametrize("block", [pytest.param(b, id=name) for name, b in python_blocks()])
def test_a_python_block_of_the_documentation_runs(block: str, tmp_path: Path) -> None:
    done = subprocess.run(  # noqa: PLW1510 - the assertion shows what it printed
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    links = [target for target, _ in LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target in links if not (page.parent / target).exists()] == []


def test_the_configuration_reference_is_up_to_date() -> None:
    script = ROOT / "scripts" / "config_reference.py"
    done = subprocess.run(  # noqa: PLW1510 - the assertion shows what it printed
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr + done.stdout


def test_every_page_is_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in ROOT.glob("docs/*.md") if f"docs/{page.name}" not in readme] == []
