"""The storage of every tier behind one object: what is refused, and that freeing frees."""

import gc
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError, TierUnavailable
from kvstrata.core.layout import ElementType, KVCacheLayout, KVCacheLayoutType, KVGroup
from kvstrata.core.tiers import DiskTier
from kvstrata.core.types import STORE_KEY_BYTES, Read, Write
from kvstrata.storage.engine import StorageEngine
from kvstrata.storage.handles import DeviceType
from kvstrata.storage.host import HostMemory
from kvstrata.testing import MemoryStore

KEY = b"k" * STORE_KEY_BYTES
BLOCKWISE = KVCacheLayoutType.BLOCKWISE


def layout(kind: KVCacheLayoutType = BLOCKWISE, **changes: Any) -> KVCacheLayout:
    sizes = {
        "num_layer": 2,
        "num_block": 1,
        "tokens_per_block": 8,
        "num_head": 4,
        "head_size": 16,
    } | changes
    return KVCacheLayout(kind, **sizes)


GROUP = KVGroup(layout(), ElementType.BFLOAT16)
BLOCK_BYTES = 4096  # of GROUP: 2 layers, K and V, 8 tokens, 4 heads, 16 elements of two bytes


def tiers(disk: Path | None = None) -> Any:
    text = "host:64KiB" + (f" | disk:{disk}:1MiB" if disk else "")
    return Config.model_validate({"tiers": text}).tiers


@pytest.fixture
def engine() -> Iterator[StorageEngine]:
    made = StorageEngine([GROUP], tiers())
    yield made
    made.close()


def host_mappings() -> set[str]:
    """Inodes of the host memory that is mapped; that of earlier tests may go at any moment."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:kvstrata-host" in line}


def _links() -> list[str]:
    """What the descriptors of this process are of."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that lists them is gone already
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def test_each_tier_has_a_handle(tmp_path: Path) -> None:
    remote = MemoryStore(block_bytes=BLOCK_BYTES, capacity_blocks=9)
    with closing(StorageEngine([GROUP], tiers(tmp_path / "d"), remote=remote)) as engine:
        host = engine.get_storage_handle(DeviceType.HOST)
        disk = engine.get_storage_handle(DeviceType.DISK)
        assert host is engine.host
        assert disk is engine.disk
        assert engine.get_storage_handle(DeviceType.REMOTE).data is remote
        assert (host.bytes_per_block, host.capacity_blocks) == (BLOCK_BYTES, 16)
        assert (disk.bytes_per_block, disk.capacity_blocks) == (BLOCK_BYTES, 128)
        assert host.groups == (GROUP,)
        host.data.view(3)[:] = b"\x05" * BLOCK_BYTES
        assert disk.data.write([KEY], [None], [host.data.view(3)]) == [Write.STORED]
        assert disk.data.read_into([KEY], [host.data.view(4)]) == [Read.HIT]
        assert bytes(host.data.view(4)) == b"\x05" * BLOCK_BYTES


def test_a_block_may_be_bytes_that_nobody_looks_into() -> None:
    with closing(StorageEngine(5000, tiers())) as engine:
        assert engine.host.groups == ()
        assert (engine.host.bytes_per_block, engine.host.capacity_blocks) == (5000, 8)
        assert engine.disk is None


def test_a_block_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="a block of 0 bytes"):
        StorageEngine([], tiers())
    with pytest.raises(ConfigError, match="a block of 0 bytes"):
        StorageEngine(0, tiers())


def test_groups_of_a_hybrid_model_lie_in_one_slot() -> None:
    latent = KVGroup(layout(is_mla=True, num_layer=3, num_head=1), ElementType.INT8)
    with closing(StorageEngine([GROUP, latent], tiers())) as engine:
        assert engine.host.bytes_per_block == BLOCK_BYTES + 3 * 8 * 16


def test_a_missing_handle_is_an_error_that_names_those_there_are(engine: StorageEngine) -> None:
    with pytest.raises(ConfigError, match=r"no storage on disk 0(.|\n)*registered are: host 0"):
        engine.get_storage_handle(DeviceType.DISK)
    with pytest.raises(ConfigError, match="no storage on device 3"):
        engine.get_storage_handle(DeviceType.DEVICE, 3)


def test_disk_without_host_is_refused(tmp_path: Path) -> None:
    disk = DiskTier(paths=(tmp_path / "d",), capacity=1 << 20)
    with pytest.raises(ConfigError, match="no host tier: disk and remote blocks pass through"):
        StorageEngine([GROUP], [disk])
    assert not (tmp_path / "d").exists()


def test_layouts_that_differ_between_tiers_are_refused() -> None:
    with pytest.raises(ConfigError, match="are BLOCKWISE, not LAYERWISE"):
        StorageEngine([KVGroup(layout(KVCacheLayoutType.LAYERWISE), GROUP.dtype)], tiers())
    remote = MemoryStore(block_bytes=512, capacity_blocks=9)
    with pytest.raises(ConfigError, match="remote tier holds blocks of 512 bytes, host memory of"):
        StorageEngine([GROUP], tiers(), remote=remote)
    assert remote.exists([KEY]) == [False]  # it is still its owner's


def test_a_disk_that_cannot_be_opened_leaves_no_host_memory(tmp_path: Path) -> None:
    (tmp_path / "stranger").write_text("x")
    before = host_mappings()
    with pytest.raises(ConfigError):
        StorageEngine([GROUP], tiers(tmp_path / "stranger"))
    assert host_mappings() <= before


def test_close_frees_memory_and_closes_stores(tmp_path: Path) -> None:
    gc.collect()  # what other tests have left goes now and not meanwhile
    remote = MemoryStore(block_bytes=BLOCK_BYTES, capacity_blocks=9)
    engine = StorageEngine([GROUP], tiers(tmp_path / "d"), remote=remote)
    assert engine.disk is not None
    disk = engine.disk.data
    inode = str(os.fstat(engine.host.data.mapping.fd).st_ino)
    assert inode in host_mappings()
    engine.close()
    engine.close()
    assert inode not in host_mappings()
    assert not [link for link in _links() if str(tmp_path) in link]
    for store in (disk, remote):
        with pytest.raises(TierUnavailable):
            store.exists([KEY])
    with pytest.raises(ConfigError, match="registered are: none"):
        engine.get_storage_handle(DeviceType.HOST)


def test_host_memory_is_freed_last(tmp_path: Path) -> None:
    with closing(StorageEngine([GROUP], tiers(tmp_path / "d"))) as engine:
        with pytest.raises(ConfigError, match="host memory is freed before disk"):
            engine.free(DeviceType.HOST)
        engine.free(DeviceType.DISK)
        engine.free(DeviceType.DISK)
        engine.free(DeviceType.HOST)
        assert engine.disk is None


def test_what_was_on_disk_is_there_when_the_engine_comes_again(tmp_path: Path) -> None:
    for fate in (Write.STORED, Write.EXISTS):
        with closing(StorageEngine([GROUP], tiers(tmp_path / "d"))) as engine:
            assert engine.disk is not None
            view = engine.host.data.view(0)
            assert engine.disk.data.write([KEY], [None], [view]) == [fate]
            view.release()


def test_files_of_a_disk_tier_are_deleted_if_that_is_asked_for(tmp_path: Path) -> None:
    directories = (tmp_path / "a", tmp_path / "b")
    disk = DiskTier(paths=directories, capacity=1 << 20)
    with closing(StorageEngine([GROUP], [*tiers(), disk])) as engine:
        assert engine.disk is not None
        engine.disk.data.write([KEY], [None], [engine.host.data.view(0)])
        (tmp_path / "a" / "notes.txt").write_text("not of the store")
        engine.free(DeviceType.DISK, unlink=True)
        left = [file.name for directory in directories for file in directory.iterdir()]
        assert left == ["notes.txt"]
        engine.free(DeviceType.DISK, unlink=True)


def test_files_that_another_process_has_opened_meanwhile_are_left_alone(tmp_path: Path) -> None:
    with closing(StorageEngine([GROUP], tiers(tmp_path))) as engine:
        assert engine.disk is not None
        engine.disk.data.close()
        with closing(StorageEngine([GROUP], tiers(tmp_path))) as other:
            with pytest.raises(ConfigError, match="is in use by process"):
                engine.free(DeviceType.DISK, unlink=True)
            assert other.disk is not None
            assert other.disk.data.write([KEY], [None], [other.host.data.view(0)]) == [Write.STORED]


def test_view_outlives_the_memory(engine: StorageEngine) -> None:
    memory: HostMemory = engine.host.data
    view = memory.view(1)
    view[:2] = b"ab"
    del memory
    engine.close()
    assert bytes(view[:3]) == b"ab\0"
