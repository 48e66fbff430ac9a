"""What this machine can hold: memory available to this process, free disk.

``root`` parameters are the root of the file system; tests give another.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvstrata.core.errors import ConfigError
from kvstrata.core.tiers import DiskTier, HostTier
from kvstrata.core.units import exact_bytes, human_bytes

__all__ = [
    "DISK_CAPACITY",
    "HOST_CAPACITY",
    "available_memory_bytes",
    "check_disk_capacity",
    "check_host_capacity",
    "free_disk_bytes",
    "nearest_existing",
    "resolve_host_capacity",
]

HOST_CAPACITY: Final = "the capacity of the host tier in `tiers`"
DISK_CAPACITY: Final = "the capacity of the disk tier in `tiers`"
AUTO_SHARE: Final = 0.25
AUTO_MOST_BYTES: Final = 64 * 2**30
_PAGE_BYTES: Final = 4096
_ROOT: Final = Path("/")


class _CgroupFiles(NamedTuple):
    """Where one version of cgroups keeps its numbers."""

    limit: str
    used: str
    reclaimable: str  # name in memory.stat of page cache that is dropped under pressure


_V1: Final = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = _CgroupFiles("memory.max", "memory.current", "inactive_file")


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Return how many bytes this process can still take before the kernel has to kill.

    The smaller of ``MemAvailable`` and the headroom of every memory cgroup above this process.
    """
    return min([_mem_available_bytes(root), *_cgroup_headrooms(root)])


def resolve_host_capacity(
    tier: HostTier, root: Path = _ROOT, *, setting: str = HOST_CAPACITY
) -> int:
    """Return the bytes of host memory that *tier* means here, known to be available now.

    *setting* is what a ``ConfigError`` calls its capacity.
    ``auto`` is 25 % of the memory available, at most 64 GiB, in whole pages.
    """
    if tier.capacity != "auto":
        check_host_capacity(tier.capacity, root, setting=setting)
        return tier.capacity
    available = available_memory_bytes(root)
    capacity = min(int(available * AUTO_SHARE), AUTO_MOST_BYTES) // _PAGE_BYTES * _PAGE_BYTES
    if capacity == 0:
        raise ConfigError(
            f"no memory is available for the host tier ({human_bytes(available)})",
            hint="free memory or raise the limit of this cgroup",
        )
    return capacity


def check_host_capacity(
    capacity_bytes: int, root: Path = _ROOT, *, setting: str = HOST_CAPACITY
) -> None:
    """Raise ConfigError if a host tier of *capacity_bytes* does not fit in available memory."""
    available = available_memory_bytes(root)
    if capacity_bytes > available:
        raise ConfigError(
            f"the host tier wants {human_bytes(capacity_bytes)} and "
            f"{human_bytes(available)} of memory is available",
            hint=f"lower {setting} to less than "
            f"{exact_bytes(available // 2**20 * 2**20)}, or to auto, or free memory, or raise the "
            f"limit of this cgroup",
        )


def check_disk_capacity(tier: DiskTier, *, setting: str = DISK_CAPACITY) -> None:
    """Raise ConfigError if *tier* does not fit on its file systems, an equal part on each.

    What its directory holds already counts as its own, so a restart asks for no second copy.
    """
    share = tier.capacity // len(tier.paths)
    for path in tier.paths:
        free, held = free_disk_bytes(path), _held_bytes(path)
        if share > free + held:
            raise ConfigError(
                f"the disk tier wants {human_bytes(share)} in {path}, where "
                f"{human_bytes(free)} is free and {human_bytes(held)} is its own already",
                hint=f"lower {setting}, or free space, or take another directory",
            )


def free_disk_bytes(path: Path) -> int:
    """Return the bytes that this user may still write at *path*, which need not exist yet."""
    existing = nearest_existing(path)
    try:
        status = os.statvfs(existing)
    except OSError as e:
        raise ConfigError(f"cannot ask {existing} for its free space: {e.strerror}") from e
    return status.f_bavail * status.f_frsize


def nearest_existing(path: Path) -> Path:
    """Return *path*, or the first directory above it that exists."""
    for candidate in (path, *path.parents):
        if os.path.lexists(candidate):
            return candidate
    return Path(path.anchor or ".")


def _held_bytes(directory: Path) -> int:
    try:
        with os.scandir(directory) as entries:
            return sum(
                entry.stat(follow_symlinks=False).st_blocks * 512
                for entry in entries
                if entry.is_file(follow_symlinks=False)
            )
    except OSError:  # not there yet, or not ours to read: nothing of it is ours
        return 0


def _mem_available_bytes(root: Path) -> int:
    path = root / "proc/meminfo"
    numbers = _table(path)
    for name in ("MemAvailable:", "MemFree:"):
        if name in numbers:
            return numbers[name] * 1024
    raise ConfigError(
        f"{path} does not say how much memory is available", hint="KVStrata runs on Linux"
    )


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _headrooms(mount, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _headrooms(mount / "memory", path, _V1)


def _headrooms(mount: Path, path: str, files: _CgroupFiles) -> Iterator[int]:
    """Yield the headroom of the cgroup *path* and of each one above it.

    In a container *path* may be the host's name for it and not exist below *mount*; the
    container's own limit is then at *mount*.
    """
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    for depth in range(len(parts), -1, -1):
        directory = mount.joinpath(*parts[:depth])
        limit = _read(directory / files.limit).strip()
        used = _read(directory / files.used).strip()
        if limit.isdecimal() and used.isdecimal():
            cache = _table(directory / "memory.stat").get(files.reclaimable, 0)
            yield max(0, int(limit) - max(0, int(used) - cache))


def _table(path: Path) -> dict[str, int]:
    """Return the lines ``name number …`` of *path*; empty if it cannot be read."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
