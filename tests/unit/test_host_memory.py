"""The host tier's memory: prefault, huge pages, NUMA nodes, runs for pinning, how it is used."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstrata.core.errors import ConfigError, ProtocolError
from kvstrata.storage.host import HostMemory
from kvstrata.storage.mapping import HUGE_PAGE_BYTES, HostMapping
from kvstrata.storage.numa import cpus_near, memory_nodes

MIB = 1 << 20
OVERCOMMIT = Path("/proc/sys/vm/nr_overcommit_hugepages")


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """Huge pages to be had, which the machine's owner has to allow."""
    before = OVERCOMMIT.read_text() if OVERCOMMIT.exists() else ""
    try:
        OVERCOMMIT.write_text("8")
    except OSError as e:
        pytest.skip(f"huge pages cannot be allowed here: {e}")
    try:
        yield
    finally:
        OVERCOMMIT.write_text(before)


@pytest.fixture
def no_huge_pages() -> None:
    pools = ("nr_hugepages", "nr_overcommit_hugepages")
    if any(int(Path("/proc/sys/vm", pool).read_text()) for pool in pools):
        pytest.skip("this machine has huge pages")


def memory(slots: int = 3, block_bytes: int = MIB, **options: object) -> HostMemory:
    table_bytes = 2 * MIB if options.get("huge_pages") else 0
    capacity_bytes = slots * -(-block_bytes // 4096) * 4096 + table_bytes
    return HostMemory(
        capacity_bytes=capacity_bytes,
        block_bytes=block_bytes,
        server_id=b"s",
        **options,  # type: ignore[arg-type]  # object, so that each test names what it sets
    )


def host_descriptors() -> set[tuple[str, int]]:
    """Descriptors of host tiers, with inodes; those of earlier tests may go at any moment."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them is gone already
            if "memfd:kvstrata-host" in os.readlink(f"/proc/self/fd/{fd}"):
                found.add((fd, os.fstat(int(fd)).st_ino))
    return found


# -- prefault ------------------------------------------------------------------------------------


def test_prefault_reports_its_progress_from_nothing_to_all() -> None:
    host = memory(slots=160)
    seen: list[tuple[int, int]] = []
    backed: list[int] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        backed.append(host.usage().backed_bytes)

    host.prefault(progress)
    total = 4096 + 160 * MIB
    assert seen == [(done, total) for done in (0, 64 * MIB, 128 * MIB, total)]
    assert backed == [done for done, _ in seen]
    host.close()


def test_close_ends_a_prefault_early() -> None:
    host = memory(slots=160)
    host.prefault(lambda done, _: host.close() if done else None)
    assert host.mapping.fd == -1
    assert np.count_nonzero(host.mapping.data) == 0


def test_memory_that_is_not_prefaulted_is_taken_as_it_is_used() -> None:
    host = memory()
    assert host.usage().backed_bytes == 0
    host.view(1)[:] = b"\1" * MIB
    assert host.usage().backed_bytes == MIB
    host.close()


def test_memory_that_runs_out_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    host = memory()
    monkeypatch.setattr("kvstrata.storage.mapping._fault_in", refuse)
    with pytest.raises(ConfigError, match=r"ran out .*Cannot allocate(.|\n)*lower the capacity"):
        host.prefault()
    host.close()


# -- how it is used ------------------------------------------------------------------------------


def test_usage_counts_what_blocks_leave_of_their_slots() -> None:
    host = memory(slots=10, block_bytes=5000)
    usage = host.usage()
    assert usage.total_bytes == 4096 + 10 * 8192
    assert usage.padding_bytes == 4096 + 10 * 3192
    assert usage.padding_share == pytest.approx(36016 / 86016)
    host.close()
    assert host.usage() == usage


# -- huge pages ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("huge_pages")
def test_huge_pages_back_memory_that_others_map_too() -> None:
    host = memory(slots=4, huge_pages=True)
    mapping = host.mapping
    assert mapping.page_bytes == HUGE_PAGE_BYTES
    assert os.fstat(mapping.fd).st_size == mapping.total_bytes == 6 * MIB  # the table takes 2
    assert os.fstat(mapping.fd).st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):
        os.ftruncate(mapping.fd, 2 * MIB)
    host.prefault()
    assert host.usage().backed_bytes == 6 * MIB
    theirs = HostMapping.from_fd(os.dup(mapping.fd), b"s", 4, MIB)
    theirs.touch(threading.Event())
    theirs.data[2] = 7
    host.disown(np.array([1], np.int32))
    assert bytes(host.view(2)) == b"\7" * MIB
    assert theirs.generations.tolist() == [0, 1, 0, 0]
    fd = os.dup(mapping.fd)
    with pytest.raises(ProtocolError, match=r"has 6291456 bytes, expected 8388608"):
        HostMapping.from_fd(fd, b"s", 5, MIB)
    os.close(fd)
    theirs.close()
    host.close()


@pytest.mark.usefixtures("huge_pages")
def test_huge_pages_of_the_whole_capacity_are_enough() -> None:
    for pages in (3, 8):  # the fixture allows eight
        host = HostMemory(
            capacity_bytes=pages * 2 * MIB, block_bytes=MIB, server_id=b"s", huge_pages=True
        )
        assert host.slots == 2 * (pages - 1)
        assert host.usage().total_bytes == pages * 2 * MIB
        host.close()
        del host
    with pytest.raises(ConfigError, match="holds no block"):
        HostMemory(capacity_bytes=2 * MIB, block_bytes=MIB, server_id=b"s", huge_pages=True)


@pytest.mark.usefixtures("huge_pages")
def test_huge_pages_take_a_node() -> None:
    host = memory(huge_pages=True, numa_node=memory_nodes()[0])
    host.prefault()
    assert f"prefer:{memory_nodes()[0]}" in _policy(host.mapping)
    host.close()


@pytest.mark.usefixtures("no_huge_pages")
def test_huge_pages_that_the_kernel_has_not_set_aside_are_an_error_that_says_how_many() -> None:
    before = host_descriptors()
    with pytest.raises(ConfigError, match=r"huge pages(.|\n)*3 more huge pages .*vm.nr_hugepages"):
        memory(slots=4, huge_pages=True)
    assert host_descriptors() <= before


# -- NUMA ----------------------------------------------------------------------------------------


def _policy(mapping: HostMapping) -> str:
    """The line of the kernel about *mapping* in this process."""
    wanted = f"{mapping.address:x} "
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(line for line in lines if line.startswith(wanted))


@pytest.mark.parametrize(
    ("text", "nodes"), [("0\n", [0]), ("0-1,3\n", [0, 1, 3]), ("1,4-6", [1, 4, 5, 6])]
)
def test_nodes_are_those_that_have_memory(tmp_path: Path, text: str, nodes: list[int]) -> None:
    (tmp_path / "has_memory").write_text(text)
    assert memory_nodes(tmp_path) == nodes


def test_a_machine_that_tells_of_no_nodes_has_one(tmp_path: Path) -> None:
    assert memory_nodes(tmp_path / "absent") == [0]


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
def test_memory_is_taken_from_the_node_that_is_asked_for() -> None:
    node = memory_nodes()[0]
    host = memory(numa_node=node)
    host.prefault()
    line = _policy(host.mapping)
    assert f"prefer:{node}" in line
    assert f"N{node}=769" in line  # pages: three slots and the table
    theirs = HostMapping.from_fd(os.dup(host.mapping.fd), b"s", 3, MIB)
    assert f"prefer:{node}" in _policy(theirs)  # a worker's mapping keeps to it
    theirs.close()
    host.close()


def test_an_unknown_node_is_an_error_that_names_those_there_are() -> None:
    before = host_descriptors()
    with pytest.raises(ConfigError, match=r"no NUMA node 999 (.|\n)*choose one of: 0"):
        memory(numa_node=999)
    assert host_descriptors() <= before


def test_a_node_that_the_kernel_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.storage.numa._MBIND", {})
    with pytest.raises(ConfigError, match=r"cannot be taken from NUMA node 0(.|\n)*mbind"):
        memory(numa_node=0)


# -- runs for pinning ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (256 << 30, [(0, 5 * 12288)]),
        (5 * 12288, [(0, 5 * 12288)]),
        (5 * 12288 - 1, [(0, 4 * 12288), (4 * 12288, 12288)]),
        (12288, [(i * 12288, 12288) for i in range(5)]),
        (1, [(i * 12288, 12288) for i in range(5)]),
    ],
)
def test_runs_for_pinning_are_whole_slots(most: int, expected: list[tuple[int, int]]) -> None:
    mapping = HostMapping.create(5, 12288, b"s")
    assert mapping.registration_chunks(most) == expected
    mapping.close()


def test_a_terabyte_is_pinned_in_runs_of_at_most_256_gib() -> None:
    mapping = HostMapping.create(1 << 20, MIB, b"s")  # takes address space, no memory
    runs = mapping.registration_chunks()
    assert runs == [(i << 38, 1 << 38) for i in range(4)]
    mapping.close()


@pytest.mark.usefixtures("huge_pages")
def test_runs_for_pinning_begin_with_a_huge_page() -> None:
    mapping = HostMapping.create(5, 3 * MIB // 2, b"s", huge_pages=True)
    starts = [start for start, _ in mapping.registration_chunks(7 * MIB)]
    assert starts == [0, 6 * MIB]
    mapping.close()


def test_processors_near_others_are_all_of_their_nodes(tmp_path: Path) -> None:
    for number, listed in enumerate(("0-3,8-11", "4-7", "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{listed}\n")
    (tmp_path / "node3").mkdir()
    first, second = frozenset([0, 1, 2, 3, 8, 9, 10, 11]), frozenset([4, 5, 6, 7])
    assert cpus_near(frozenset([9]), tmp_path) == first
    assert cpus_near(frozenset([9, 4]), tmp_path) == first | second
    assert cpus_near(frozenset([12]), tmp_path) == frozenset()
    assert cpus_near(frozenset([0]), tmp_path / "absent") == frozenset()
