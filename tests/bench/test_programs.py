"""Benches that no other test starts: that they come up, and know the options of the docs."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").rglob("*.md"), ROOT / "bench" / "README.md", ROOT / "README.md"]
WITH_OPTIONS = ("compress", "disk", "disk_costs", "index", "server", "shared_fs")
WITHOUT = {"charge": "main", "feed": "main", "near": "once"}


def options_in_docs(program: str) -> set[str]:
    """Of the commands that begin with *program*, over all lines that they go on to."""
    text = "\n".join(page.read_text().replace("\\\n", " ") for page in PAGES)
    commands = re.findall(rf"python bench/{program}\.py[^\n`]*", text)
    return {word for command in commands for word in re.findall(r"--[a-z-]+", command)}


@pytest.mark.parametrize("program", WITH_OPTIONS)
def test_a_program_has_the_options_that_docs_give_it(program: str) -> None:
    shown = subprocess.run(
        [sys.executable, str(ROOT / "bench" / f"{program}.py"), "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    assert options_in_docs(program) <= set(re.findall(r"--[a-z-]+", shown.stdout))


@pytest.mark.parametrize(("program", "measures"), WITHOUT.items())
def test_a_program_without_options_can_be_loaded(program: str, measures: str) -> None:
    assert callable(runpy.run_path(str(ROOT / "bench" / f"{program}.py"))[measures])
