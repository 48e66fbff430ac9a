"""Host memory for one GPU: which pages the kernel is told to take from which node."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstrata.core.errors import ConfigError
from kvstrata.storage import near
from kvstrata.storage.mapping import HostMapping
from kvstrata.storage.near import bring_near
from kvstrata.storage.numa import has_policy, memory_nodes, node_of_pci

PAGE, PAGES, SLOTS = 4096, 8, 5
NODE = memory_nodes()[0]


@pytest.fixture
def mapping() -> Iterator[HostMapping]:
    made = HostMapping.create(SLOTS, PAGES * PAGE, b"server")
    yield made
    made.close()


def chosen(mapping: HostMapping) -> list[list[int]]:
    """The pages of each slot for which the kernel has been told a node."""
    start = mapping.data.ctypes.data
    return [
        [page for page in range(PAGES) if has_policy(start + (slot * PAGES + page) * PAGE)]
        for slot in range(SLOTS)
    ]


@pytest.mark.parametrize("at_a_time", [8192, 2])
def test_a_rank_gets_the_whole_pages_of_its_share(
    mapping: HostMapping, monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    monkeypatch.setattr(near, "_SLOTS_AT_A_TIME", at_a_time)
    assert bring_near(mapping, 2 * PAGE + 100, 3 * PAGE, NODE)
    assert chosen(mapping) == [[3, 4]] * SLOTS
    assert not has_policy(mapping.address)  # the generations
    assert bring_near(mapping, 5 * PAGE + 100, 2 * PAGE + 3996, NODE)
    assert chosen(mapping) == [[3, 4, 6, 7]] * SLOTS


def test_a_rank_that_has_the_whole_slot_gets_all(mapping: HostMapping) -> None:
    assert bring_near(mapping, 0, PAGES * PAGE, NODE)
    assert chosen(mapping) == [[*range(PAGES)]] * SLOTS


def test_whoever_touches_a_page_takes_it_from_that_node(mapping: HostMapping) -> None:
    """The server does, most often: what a worker has said holds for its mapping, too."""
    server = HostMapping.from_fd(os.dup(mapping.fd), b"server", SLOTS, PAGES * PAGE)
    bring_near(mapping, PAGE, PAGE, NODE)
    assert chosen(server) == [[1]] * SLOTS
    server.data[:] = 7
    assert (mapping.data == 7).all()
    server.close()


def test_a_share_changes_no_byte_and_leaves_the_mapping_in_one_piece(mapping: HostMapping) -> None:
    mapping.data[:] = 9
    before = len(Path("/proc/self/maps").read_text().splitlines())
    bring_near(mapping, PAGE, PAGE, NODE)
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before
    assert (mapping.data == 9).all()


def test_a_node_that_the_operator_has_chosen_stays(mapping: HostMapping) -> None:
    assert bring_near(mapping, 0, PAGES * PAGE, NODE)
    assert not bring_near(mapping, PAGE, PAGE, NODE)


@pytest.mark.parametrize(("start", "length"), [(100, PAGE), (0, PAGE - 1), (PAGES * PAGE, PAGE)])
def test_a_share_without_a_whole_page_of_a_slot_is_left_alone(
    mapping: HostMapping, start: int, length: int
) -> None:
    assert not bring_near(mapping, start, length, NODE)
    assert chosen(mapping) == [[]] * SLOTS


def test_huge_pages_are_left_to_the_server(mapping: HostMapping) -> None:
    mapping.page_bytes = 2 << 20
    assert not bring_near(mapping, 0, PAGES * PAGE, NODE)


def test_a_node_that_is_not_there_is_an_error(mapping: HostMapping) -> None:
    with pytest.raises(ConfigError, match="no NUMA node 999"):
        bring_near(mapping, PAGE, PAGE, 999)
    assert chosen(mapping) == [[]] * SLOTS


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None)])
def test_the_node_of_a_device_is_what_the_kernel_says(
    tmp_path: Path, text: str, node: int | None
) -> None:
    device = tmp_path / "0000:65:00.0"
    device.mkdir()
    (device / "numa_node").write_text(text)
    assert node_of_pci("0000:65:00.0", tmp_path) == node
    assert node_of_pci("0000:66:00.0", tmp_path) is None
