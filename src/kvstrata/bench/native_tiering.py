"""vLLM's own tiering offload on the CPU backend, to be measured against.

Its index, eviction, file tier and scheduling are used as they are. Only the worker is ours: vLLM's
copies with CUDA and refuses to be made on a CPU. Pages are copied as numpy bytes at once in the
call, the fastest way that was found here, so that the comparison flatters it.

Used with ``OffloadingConnector`` and ``{"spec_name": "CpuPagesSpec", "spec_module_path":
"kvstrata.bench.native_tiering", "cpu_bytes_to_use": ..., "counts_path": ...}`` (``counts.Counts``).
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstrata.bench.counts import Counts

Pages = npt.NDArray[np.uint8]  # (blocks, page_bytes)


class CpuPagesWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM's types are Any
    """Copies pages within the call; every job has ended when it has been submitted."""

    def __init__(self, device: Sequence[Pages], host: Sequence[Pages], counts: Counts) -> None:
        self._pairs = list(zip(device, host, strict=True))
        self._counts = counts
        self._ended: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        started = time.perf_counter()
        for device, host in self._pairs:
            for source, target in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                host[target, : device.shape[1]] = device[source]
        return self._end(job_id, started, len(src_spec.block_ids), self._counts.stored)

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        started = time.perf_counter()
        for device, host in self._pairs:
            for source, target in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                device[target] = host[source, : device.shape[1]]
        return self._end(job_id, started, len(src_spec.block_ids), self._counts.loaded)

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever running."""

    def _end(self, job_id: int, started: float, blocks: int, count: Callable[[int], None]) -> bool:
        moved_bytes = blocks * sum(device.shape[1] for device, _ in self._pairs)
        took_seconds = max(time.perf_counter() - started, 1e-9)
        count(moved_bytes)
        self._ended.append(TransferResult(job_id, True, moved_bytes, took_seconds))
        return True


class CpuPagesSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM's types are Any
    """vLLM's tiering with a worker that runs here."""

    _region: SharedOffloadRegion | None = None
    _worker: CpuPagesWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            if self.blocks_per_chunk != 1:
                raise ValueError("chunks of several blocks are not copied here")
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._region = region  # its memory must outlive the views
            host = [region.create_next_worker_view(t.page_size_bytes) for t in kv_caches.tensors]
            self._worker = CpuPagesWorker(
                [t.tensor.numpy().view(np.uint8) for t in kv_caches.tensors],
                [view.numpy().view(np.uint8) for view in host],
                Counts(self.extra_config["counts_path"]),
            )
        return self._worker
