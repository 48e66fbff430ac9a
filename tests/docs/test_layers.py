"""The tables of layers are the contract that `lint-imports` checks, and say who imports torch and vLLM."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "src" / "kvstrata"


def contract() -> list[set[str]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (each["layers"] for each in settings["contracts"] if each["type"] == "layers")
    return [set(re.findall(r"\w+", layer)) for layer in layers]


def rows(page: str, head: str) -> list[list[str]]:
    text = (ROOT / page).read_text()
    assert head in text
    lines = text.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


ARCHITECTURE: Final = rows("docs/architecture.md", "| package | what | torch | vLLM |")
CONTRIBUTING: Final = rows("CONTRIBUTING.md", "| layer | subject |")


@pytest.mark.parametrize(
    "shown", [ARCHITECTURE, CONTRIBUTING], ids=["architecture", "contributing"]
)
def test_the_layers_are_those_of_the_contract(shown: list[list[str]]) -> None:
    assert [set(re.findall(r"`(\w+)`", row[0])) for row in shown] == contract()


def test_every_package_is_in_a_layer() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set().union(*contract()) == packages


def imported(package: str) -> Iterator[str]:
    for file in (PACKAGE / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from (each.name.partition(".")[0] for each in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize(("column", "library"), [(2, "torch"), (3, "vllm")])
def test_who_imports_torch_and_vllm_is_said(column: int, library: str) -> None:
    """Of a line with two packages, the one that does is named."""
    for row in ARCHITECTURE:
        packages = set(re.findall(r"`(\w+)`", row[0]))
        importing = {each for each in packages if library in imported(each)}
        assert bool(row[column]) == bool(importing), row
        if importing and importing != packages:
            assert set(re.findall(r"`(\w+)`", row[column])) == importing, row
