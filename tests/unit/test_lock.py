"""What `make` installs, wherever a project of Python 3.11 can be."""

import re
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

LOCK = (Path(__file__).parents[2] / "requirements-dev.lock").read_text()
NAMES = re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==", LOCK, re.MULTILINE)
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "pybind11"}  # on purpose, as the lock says


def test_all_that_is_pinned_takes_the_first_python_that_the_project_takes() -> None:
    """Debian 12 has 3.11.2."""
    assert len(NAMES) > 100
    asked = {name: str(metadata(name).json.get("requires_python", "")) for name in NAMES}
    assert [name for name in NAMES if not SpecifierSet(asked[name]).contains("3.11.0")] == []


@pytest.mark.parametrize("python", ["3.11.0", "3.11.15"])
def test_all_that_is_asked_for_by_what_is_pinned_is_pinned(python: str) -> None:
    there = {"python_version": "3.11", "python_full_version": python, "extra": ""}
    asked = {
        canonicalize_name(one.name)
        for name in NAMES
        for one in map(Requirement, requires(name) or ())
        if one.marker is None or one.marker.evaluate(there)
    }
    assert asked - {canonicalize_name(name) for name in NAMES} == LEFT_OUT
