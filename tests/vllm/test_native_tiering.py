"""The worker that the bench gives to vLLM's tiering on a CPU."""

from pathlib import Path

import numpy as np
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec

from kvstrata.bench.counts import Counts, read_counts
from kvstrata.bench.native_tiering import CpuPagesWorker


def blocks(*ids: int) -> BlockIDsLoadStoreSpec:
    return BlockIDsLoadStoreSpec(list(ids))


def test_bytes_that_are_loaded_and_stored_are_counted_where_the_bench_reads_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "moved"
    assert read_counts(path) is None
    device = [np.full((4, 10), 7, np.uint8), np.full((4, 6), 8, np.uint8)]
    host = [np.zeros((4, 16), np.uint8), np.zeros((4, 16), np.uint8)]
    worker = CpuPagesWorker(device, host, Counts(path))
    assert worker.submit_store(1, blocks(0, 1, 2), blocks(3, 1, 0))
    assert worker.submit_load(2, blocks(3), blocks(2))
    assert read_counts(path) == (16, 48)
    assert [(each.job_id, each.transfer_size) for each in worker.get_finished()] == [
        (1, 48),
        (2, 16),
    ]
