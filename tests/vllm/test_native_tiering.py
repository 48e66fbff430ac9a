"""The worker that the bench gives to vLLM's tiering on a CPU."""

from pathlib import Path

import numpy as np
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec

from kvstrata.bench.engine import _native_moved
from kvstrata.bench.native_tiering import CpuPagesWorker


def blocks(*ids: int) -> BlockIDsLoadStoreSpec:
    return BlockIDsLoadStoreSpec(list(ids))


def test_bytes_that_are_loaded_and_stored_are_counted_where_the_bench_reads_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "moved"
    assert _native_moved(path) == {}
    counts = np.memmap(path, np.int64, "w+", shape=2)
    device = [np.full((4, 10), 7, np.uint8), np.full((4, 6), 8, np.uint8)]
    host = [np.zeros((4, 16), np.uint8), np.zeros((4, 16), np.uint8)]
    worker = CpuPagesWorker(device, host, counts)
    assert worker.submit_store(1, blocks(0, 1, 2), blocks(3, 1, 0))
    assert worker.submit_load(2, blocks(3), blocks(2))
    assert _native_moved(path) == {"host read": 16, "host write": 48}
    assert [(each.job_id, each.transfer_size) for each in worker.get_finished()] == [
        (1, 48),
        (2, 16),
    ]
