"""What `make` installs, wherever a project of Python 3.11 can be."""

import re
from importlib.metadata import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

LOCK = Path(__file__).parents[2] / "requirements-dev.lock"


def test_all_that_is_pinned_takes_the_first_python_that_the_project_takes() -> None:
    """Debian 12 has 3.11.2."""
    names = re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==", LOCK.read_text(), re.MULTILINE)
    assert len(names) > 100
    asked = {name: str(metadata(name).json.get("requires_python", "")) for name in names}
    assert [name for name in names if not SpecifierSet(asked[name]).contains("3.11.0")] == []
