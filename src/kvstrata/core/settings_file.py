"""Reading a file of settings: YAML or JSON, one mapping."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from kvstrata.core.errors import ConfigError
from kvstrata.core.pipeline import redact

__all__ = ["read_settings", "show"]

_LONGEST_SHOWN_CHARACTERS: Final = 200


def read_settings(named: object, said_by: str) -> dict[str, object]:
    """Return what the file *named* holds; *said_by* is for the error, a ``ConfigError``."""
    if not isinstance(named, str | os.PathLike) or not str(named):
        raise ConfigError(
            f"{show(named)} is not the path of a file (from {said_by})",
            hint="give the path of a YAML or JSON file",
        )
    path = Path(named)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(
            f"cannot read the file {path}: {e.strerror} (from {said_by})",
            hint="check that it exists and that this user may read it",
        ) from e
    except ValueError as e:  # not UTF-8, or a zero character in the path
        raise ConfigError(
            f"cannot read the file {path}: {e} (from {said_by})", hint="save it as UTF-8 text"
        ) from e
    content = _parse(path, text)
    if not isinstance(content, dict):
        raise ConfigError(
            f"the file {path} holds a {type(content).__name__}, not a mapping (from {said_by})",
            hint="write one setting a line, for example 'tiers: host:8GiB'",
        )
    return {str(key): value for key, value in content.items()}


def _parse(path: Path, text: str) -> object:
    is_json = path.suffix == ".json" or (
        path.suffix not in {".yaml", ".yml"} and text.lstrip().startswith("{")
    )
    try:
        if is_json:
            return json.loads(text)
        content = yaml.safe_load(text)
    except json.JSONDecodeError as e:
        raise ConfigError(f"the file {path} is not JSON: {e}", hint="mend it") from e
    except yaml.MarkedYAMLError as e:
        where = f", line {e.problem_mark.line + 1}" if e.problem_mark else ""
        raise ConfigError(
            f"the file {path} is not YAML: {e.problem}{where}", hint="quote values with ': '"
        ) from e
    except yaml.YAMLError as e:
        raise ConfigError(f"the file {path} is not YAML: {e}", hint="mend it") from e
    return {} if content is None else content


def show(value: object) -> str:
    """Return a value for an error: scalars only, cut, and without secrets of an address."""
    if value is None or isinstance(value, str | int | float | os.PathLike):
        shown = redact(repr(value))
        return shown if len(shown) <= _LONGEST_SHOWN_CHARACTERS else f"{shown[:200]}…"
    return "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"
