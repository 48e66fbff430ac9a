"""Which bytes of a slot belong to which worker."""

from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.compat import kv_tp_replicas
from kvstrata.integration.vllm.geometry import DeviceGeometry

__all__ = ["Region", "SlotRegions", "slot_regions"]


@dataclass(frozen=True, slots=True)
class Region:
    """One worker's bytes of every slot."""

    start_bytes: int
    block_bytes: int  # of a whole block, the regions of all workers
    saves: bool = True  # False: a rank that holds the same KV writes them
    worker: int = 0  # its number within the engine


@dataclass(frozen=True, slots=True)
class SlotRegions:
    """The workers' regions side by side: by pipeline stage, then by tensor parallel rank.

    Consecutive tensor parallel ranks that hold the same KV, as of MLA, have one region in common;
    the first of them writes it and all read it.

    >>> regions = SlotRegions(stage_bytes=(300, 200), tensor_parallel_size=4, replicas=2)
    >>> regions.block_bytes, regions.of(1, 3)
    (1000, Region(start_bytes=800, block_bytes=1000, saves=False, worker=7))
    """

    stage_bytes: tuple[int, ...]  # of one rank of each pipeline stage
    tensor_parallel_size: int = 1
    replicas: int = 1  # consecutive tensor parallel ranks with the same KV

    @property
    def block_bytes(self) -> int:
        return sum(self.stage_bytes) * self._copies

    def of(self, stage: int, tensor_rank: int) -> Region:
        before = sum(self.stage_bytes[:stage]) * self._copies
        copy, replica = divmod(tensor_rank, self.replicas)
        start_bytes = before + copy * self.stage_bytes[stage]
        worker = stage * self.tensor_parallel_size + tensor_rank
        return Region(start_bytes, self.block_bytes, saves=replica == 0, worker=worker)

    @property
    def _copies(self) -> int:
        """Regions of one stage."""
        return self.tensor_parallel_size // self.replicas


def slot_regions(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    geometry: DeviceGeometry,
    tokens_per_block: int,
    *,
    stage: int = 0,
) -> SlotRegions:
    """The same in every process of an engine; *geometry* is that of pipeline stage *stage*.

    A process knows the layers of its own stage alone, so those of the others are counted as vLLM
    distributes them. Raises ``ConfigError`` where that does not hold for this one.
    """
    parallel = vllm_config.parallel_config
    here = geometry.rank_bytes(tokens_per_block)
    if parallel.pipeline_parallel_size == 1:
        stage_bytes: tuple[int, ...] = (here,)
    else:
        counts = _layers_by_stage(vllm_config)
        _check_stage(stage, counts, kv_cache_config, geometry)
        stage_bytes = tuple(here // counts[stage] * count for count in counts)
    return SlotRegions(stage_bytes, parallel.tensor_parallel_size, kv_tp_replicas(kv_cache_config))


def _layers_by_stage(vllm_config: VllmConfig) -> list[int]:
    stages = vllm_config.parallel_config.pipeline_parallel_size
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    spans = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
    return [end - first for first, end in spans]


def _check_stage(
    stage: int, counts: list[int], kv_cache_config: KVCacheConfig, geometry: DeviceGeometry
) -> None:
    groups = len(kv_cache_config.kv_cache_groups)
    sizes = sorted(set(geometry.page_bytes))
    if groups == len(sizes) == 1 and len(geometry.layers) == counts[stage]:
        return
    raise ConfigError(
        f"pipeline stage {stage} has {len(geometry.layers)} layers with a KV cache, in {groups} "
        f"groups, whose pages take {', '.join(str(size) for size in sizes)} bytes: with "
        f"pipeline_parallel_size = {len(counts)} all {sum(counts)} layers must have one of the "
        f"same size and kind, {counts[stage]} of them here",
        hint="use tensor parallelism alone, or run vLLM without the connector "
        "(drop --kv-transfer-config)",
    )
