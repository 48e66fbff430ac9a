import os
from pathlib import Path

import pytest

from kvstrata.core.errors import ConfigError
from kvstrata.core.limits import (
    available_memory_bytes,
    check_disk_capacity,
    check_host_capacity,
    free_disk_bytes,
    nearest_existing,
    resolve_host_capacity,
)
from kvstrata.core.tiers import DiskTier, HostTier

GIB = 2**30
UNLIMITED_V1 = 9223372036854771712


class FakeMachine:
    """A root directory that holds what the kernel would say."""

    def __init__(self, root: Path, *, available_kib: int | None = 32 * 2**20) -> None:
        self.root = root
        lines = ["MemTotal: 99999999 kB", "MemFree: 1024 kB"]
        if available_kib is not None:
            lines.append(f"MemAvailable: {available_kib} kB")
        self.write("proc/meminfo", "\n".join(lines))

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def cgroup_v2(self, directory: str, limit: str, used: int, cache: int = 0) -> None:
        self.write(f"sys/fs/cgroup{directory}/memory.max", f"{limit}\n")
        self.write(f"sys/fs/cgroup{directory}/memory.current", f"{used}\n")
        self.write(f"sys/fs/cgroup{directory}/memory.stat", f"anon 7\ninactive_file {cache}\n")

    def cgroup_v1(self, directory: str, limit: int, used: int, cache: int = 0) -> None:
        self.write(f"sys/fs/cgroup/memory{directory}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"sys/fs/cgroup/memory{directory}/memory.usage_in_bytes", f"{used}\n")
        self.write(
            f"sys/fs/cgroup/memory{directory}/memory.stat",
            f"inactive_file 1\ntotal_inactive_file {cache}\n",
        )


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def test_without_cgroups_the_available_memory_is_mem_available(machine: FakeMachine) -> None:
    assert available_memory_bytes(machine.root) == 32 * GIB


def test_an_old_kernel_without_mem_available_says_what_is_free(tmp_path: Path) -> None:
    assert available_memory_bytes(FakeMachine(tmp_path, available_kib=None).root) == 2**20


def test_a_machine_that_says_nothing_about_memory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not say how much memory"):
        available_memory_bytes(tmp_path)


def test_the_limit_of_a_cgroup_v2_bounds_memory_and_its_page_cache_does_not_count(
    machine: FakeMachine,
) -> None:
    machine.write("proc/self/cgroup", "0::/pod/container\n")
    machine.cgroup_v2("/pod/container", str(8 * GIB), 5 * GIB, cache=2 * GIB)
    assert available_memory_bytes(machine.root) == 5 * GIB


def test_the_tightest_cgroup_on_the_way_up_counts(machine: FakeMachine) -> None:
    machine.write("proc/self/cgroup", "0::/pod/container\n")
    machine.cgroup_v2("/pod/container", "max", 2 * GIB)
    machine.cgroup_v2("/pod", str(4 * GIB), 3 * GIB)
    machine.cgroup_v2("", str(100 * GIB), 3 * GIB)
    assert available_memory_bytes(machine.root) == 1 * GIB


def test_a_cgroup_over_its_limit_has_no_room(machine: FakeMachine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.cgroup_v2("", str(4 * GIB), 5 * GIB)
    assert available_memory_bytes(machine.root) == 0


def test_the_limit_of_a_cgroup_v1_bounds_memory(machine: FakeMachine) -> None:
    machine.write("proc/self/cgroup", "5:devices:/\n4:cpu,memory:/docker/abc\n0::/\n")
    machine.cgroup_v1("/docker/abc", 6 * GIB, 3 * GIB, cache=1 * GIB)
    machine.cgroup_v1("", UNLIMITED_V1, 9 * GIB)
    assert available_memory_bytes(machine.root) == 4 * GIB


@pytest.mark.parametrize("named", ["/docker/abc", "/../../system.slice", "/"])
def test_in_a_container_that_does_not_see_its_own_path_the_limit_at_the_mount_counts(
    machine: FakeMachine, named: str
) -> None:
    machine.write("proc/self/cgroup", f"4:memory:{named}\n")
    machine.cgroup_v1("", 2 * GIB, 0)
    assert available_memory_bytes(machine.root) == 2 * GIB


def test_auto_is_a_quarter_of_the_available_memory_in_whole_pages(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, available_kib=10_001)
    assert resolve_host_capacity(HostTier(), machine.root) == 2_560_000
    assert 2_560_000 <= 10_001 * 1024 // 4 < 2_560_000 + 4096


def test_auto_is_at_most_64_gib(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, available_kib=2**30)
    assert resolve_host_capacity(HostTier(capacity="auto"), machine.root) == 64 * GIB


def test_auto_without_any_memory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no memory is available"):
        resolve_host_capacity(HostTier(), FakeMachine(tmp_path, available_kib=12).root)


def test_a_given_capacity_is_taken_as_it_is(machine: FakeMachine) -> None:
    assert resolve_host_capacity(HostTier(capacity=12345), machine.root) == 12345
    assert resolve_host_capacity(HostTier(capacity=32 * GIB), machine.root) == 32 * GIB


def test_a_host_tier_larger_than_memory_is_refused_with_both_numbers(machine: FakeMachine) -> None:
    check_host_capacity(32 * GIB, machine.root)
    with pytest.raises(ConfigError, match=r"wants 40\.0 GiB and 32\.0 GiB of memory") as caught:
        check_host_capacity(40 * GIB, machine.root)
    assert "lower the capacity of the host tier in `tiers`" in str(caught.value.hint)
    with pytest.raises(ConfigError):
        resolve_host_capacity(HostTier(capacity=32 * GIB + 1), machine.root)


def test_this_machine_has_memory() -> None:
    assert available_memory_bytes() > 0


def test_a_disk_tier_larger_than_the_file_system_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there" / "yet"
    check_disk_capacity(DiskTier(paths=(directory,), capacity=4096))
    with pytest.raises(ConfigError, match=r"the disk tier wants 8192\.0 PiB in .*yet") as caught:
        check_disk_capacity(DiskTier(paths=(directory,), capacity=2**63 - 1))
    assert caught.value.hint
    assert not (tmp_path / "not").exists()


def test_what_the_directory_holds_already_counts_as_the_tiers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocks").write_bytes(bytes(1 << 20))
    os.symlink("/proc/kcore", tmp_path / "link")
    monkeypatch.setattr("kvstrata.core.limits.free_disk_bytes", lambda _: 4096)
    check_disk_capacity(DiskTier(paths=(tmp_path,), capacity=(1 << 20) + 4096))
    with pytest.raises(ConfigError, match=r"4\.0 KiB is free and 1\.0 MiB is its own"):
        check_disk_capacity(DiskTier(paths=(tmp_path,), capacity=(2 << 20) + 4096))


def test_free_disk_is_asked_of_the_nearest_directory_that_exists(tmp_path: Path) -> None:
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
    status = os.statvfs(tmp_path)
    assert free_disk_bytes(tmp_path / "a" / "b") <= status.f_blocks * status.f_frsize
