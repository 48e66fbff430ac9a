"""Settings in the spelling of another project, and what becomes of each.

It means the same as a setting of ours and is translated; or it tunes a part that only they have, and
is named in the log as without effect; or it means something else and is refused with a remedy.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from kvstrata.core.errors import ConfigError
from kvstrata.core.pipeline import directory_segment, host_segment
from kvstrata.core.settings_file import show

__all__ = [
    "GIB",
    "Fault",
    "Reader",
    "Refusal",
    "Said",
    "Translation",
    "agreed",
    "lines_of",
    "shown_tiers",
]

T = TypeVar("T")

GIB: Final = 1 << 30

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


class Fault(NamedTuple):
    """One thing wrong with what was given, and what to do about it."""

    message: str
    remedy: str


class Said(NamedTuple):
    """The value of one setting of theirs, and where it was given under which name."""

    value: object
    name: str
    place: str

    @property
    def source(self) -> str:
        return f"{self.name} in {self.place}"


class Refusal(NamedTuple):
    """A setting that means nothing here unless it has one of the values that ask for nothing."""

    remedy: str
    harmless: tuple[object, ...] = ()


@dataclass
class Translation:
    """What the settings of *project* come to."""

    project: str
    settings: dict[str, object] = field(default_factory=dict)  # ours
    origins: dict[str, str] = field(default_factory=dict)  # of each of ours, for errors
    notes: list[str] = field(default_factory=list)  # for the log: what was read as what
    idle: list[Said] = field(default_factory=list)  # what changes nothing
    faults: list[Fault] = field(default_factory=list)

    def give(self, name: str, value: object, said: Iterable[Said], shown: str) -> None:
        """Set *name* of ours to *value*, which *said* say and the log shows as *shown*."""
        self.settings[name] = value
        self.origins[name] = _sources(said)
        self.notes.append(f"{self.project}'s {self.origins[name]} is read as {name}: {shown}")


def agreed(
    project: str, sources: Iterable[Mapping[str, Said]], faults: list[Fault]
) -> dict[str, Said]:
    """Return the settings of all *sources*; what two of them say differently is a fault."""
    together: dict[str, Said] = {}
    for source in sources:
        for name, said in source.items():
            before = together.setdefault(name, said)
            if str(before.value) != str(said.value):
                faults.append(
                    Fault(
                        f"{project}'s {name} is {show(before.value)} (from {before.source}) and "
                        f"{show(said.value)} (from {said.source})",
                        "take one of them away",
                    )
                )
    return together


class Reader:
    """Takes settings of theirs by name. ``close`` deals with those that nobody has taken."""

    def __init__(self, said: Mapping[str, Said], result: Translation) -> None:
        self._left = dict(said)
        self._asked: set[str] = set()
        self._result = result

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def given(self, *names: str) -> list[Said]:
        """Those of *names* that are set and not taken yet."""
        return [self._left[name] for name in names if name in self._left]

    def gib(self, name: str) -> int | None:
        """Bytes of a number of GiB, which both projects call GB; None if unset or 0."""
        return self._take(name, lambda value: int(_number(value) * GIB)) or None

    def whole(self, name: str) -> int | None:
        return self._take(name, _whole)

    def flag(self, name: str) -> bool | None:
        return self._take(name, _flag)

    def text(self, name: str) -> str | None:
        return self._take(name, _text)

    def paths(self, name: str, separator: str) -> list[str]:
        """Directories, in one string or as a list."""

        def read(value: object) -> list[str]:
            parts = value if isinstance(value, list) else _text(value).split(separator)
            paths = [str(part).strip() for part in parts if str(part).strip()]
            for path in paths:
                if not path.startswith("/"):
                    raise ConfigError(
                        f"the path {path!r} is not absolute", hint="give an absolute path"
                    )
            return paths

        return self._take(name, read) or []

    def entries(self, name: str) -> list[Mapping[str, object]]:
        """A list of mappings."""

        def read(value: object) -> list[Mapping[str, object]]:
            if not isinstance(value, list):
                raise ConfigError("a list is expected", hint="write each entry after a dash")
            return [_mapping(each) for each in value]

        return self._take(name, read) or []

    def value(self, name: str) -> object:
        """As it was given, for a setting of ours that reads it by itself."""
        return self._take(name, lambda value: value)

    def mapping(self, name: str) -> Mapping[str, object] | None:
        return self._take(name, _mapping)

    def fault(self, message: str, remedy: str) -> None:
        """Report what is wrong between settings; *message* begins with the name of one."""
        self._result.faults.append(Fault(f"{self._result.project}'s {message}", remedy))

    def close(self, *, idle: Iterable[str], refused: Mapping[str, Refusal]) -> None:
        """Everything that is left: without effect, harmless, refused, or not known at all."""
        idle = frozenset(idle)
        for name, said in list(self._left.items()):
            if name in idle:
                self._result.idle.append(said)
            elif name not in refused:
                self._unknown(name, said, [*self._asked, *idle, *refused])
            elif said.value is not None and not _is_one_of(said.value, refused[name].harmless):
                message = f"{name} asks for what KVStrata does not do (from {said.source})"
                self.fault(message, refused[name].remedy)

    def _take(self, name: str, read: Callable[[object], T]) -> T | None:
        self._asked.add(name)
        said = self._left.pop(name, None)
        if said is None or said.value is None:
            return None
        try:
            return read(said.value)
        except ConfigError as e:
            message = f"{self._result.project}'s {name}: {e.args[0]}"
            shown = f"(got {show(said.value)}, from {said.source})"
            self._result.faults.append(Fault(f"{message} {shown}", e.hint or "mend it"))
            return None

    def _unknown(self, name: str, said: Said, known: Iterable[str]) -> None:
        close = get_close_matches(name, known, n=1)
        self._result.faults.append(
            Fault(
                f"unknown setting {name!r} of {self._result.project} (from {said.source})",
                f"did you mean {close[0]}?" if close else "take it away",
            )
        )


def shown_tiers(tiers: Iterable[Mapping[str, Any]]) -> str:
    """Return *tiers*, of host memory and disks, as a pipeline string does or nearly so."""
    return " | ".join(
        host_segment(tier["capacity"])
        if tier["kind"] == "host"
        else directory_segment(tier["kind"], [Path(p) for p in tier["paths"]], tier["capacity"])
        for tier in tiers
    )


def lines_of(translation: Translation) -> Iterator[tuple[bool, str]]:
    """What the log should say, each with whether it is a warning."""
    for note in translation.notes:
        yield False, note
    if translation.idle:
        names = _sources(translation.idle)
        yield True, f"{translation.project}'s {names}: without effect, KVStrata has no such part"


def _sources(said: Iterable[Said]) -> str:
    """Name the settings, each place once."""
    by_place: dict[str, list[str]] = {}
    for each in said:
        by_place.setdefault(each.place, []).append(each.name)
    return "; ".join(f"{', '.join(names)} in {place}" for place, names in by_place.items())


def _number(value: object) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) else None
    except ValueError:
        number = None
    if number is None or isinstance(value, bool) or not isfinite(number) or number < 0:
        raise ConfigError("a number that is not negative is expected", hint="give a number")
    return number


def _whole(value: object) -> int:
    number = _number(value)
    if not number.is_integer():
        raise ConfigError("a whole number is expected", hint="give a whole number")
    return int(number)


def _flag(value: object) -> bool:
    word = str(value).strip().lower()
    if word not in _TRUE | _FALSE:
        raise ConfigError("true or false is expected", hint="give 1 or 0")
    return word in _TRUE


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError("a text is expected", hint="put it in quotes")
    return value


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError("a mapping is expected", hint="write one setting a line")
    return {str(key): each for key, each in value.items()}


def _is_one_of(value: object, harmless: tuple[object, ...]) -> bool:
    """Whether *value* says the same as one of *harmless*; numbers and flags may be texts."""
    word = str(value).strip().lower()
    for each in harmless:
        if isinstance(each, bool):
            if word in (_TRUE if each else _FALSE):
                return True
        elif word == str(each).lower():
            return True
    return False
