"""``load_mode: layerwise``: copies layer by layer, while the forward that they are for runs.

vLLM takes such loads as synchronous: it schedules the request in the step in which it is loaded. A
load that fails then has to be taken back after the forward, which vLLM can only do where no later
step has been scheduled meanwhile.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.v1.request import Request, RequestStatus

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.blocks import BlockIds
from kvstrata.integration.vllm.geometry import DeviceGeometry
from kvstrata.transfer.guarded import Copied
from kvstrata.transfer.lanes import Handle

__all__ = ["Admitted", "LayerJobs", "check_layerwise", "take_back"]

_BLOCKWISE = "take load_mode away from --kv-transfer-config"


def check_layerwise(config: Config, vllm_config: VllmConfig, geometry: DeviceGeometry) -> None:
    """Raises ``ConfigError`` where vLLM could not take a failed load back."""
    if config.load_mode == "blockwise":
        return
    if vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            "load_mode is 'layerwise' and async scheduling is on: the next step would be "
            "scheduled before it is known whether this step's loads were whole",
            hint=f"start vLLM with --no-async-scheduling, or {_BLOCKWISE}",
        )
    if (stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        raise ConfigError(
            f"load_mode is 'layerwise' and pipeline_parallel_size is {stages}: the next steps "
            "would be scheduled before it is known whether this step's loads were whole",
            hint=f"set --pipeline-parallel-size to 1, or {_BLOCKWISE}",
        )
    if len(geometry.groups) > 1 or geometry.groups[0].reach.is_limited:
        raise ConfigError(
            "load_mode is 'layerwise' and the model has several KV cache groups, or layers with a "
            "sliding window or chunked attention: vLLM takes failed device blocks back only where "
            "it keeps those before them",
            hint=_BLOCKWISE,
        )


class LayerJobs:
    """The copies of some tasks of one step: jobs for each layer, shared by the tasks."""

    def __init__(
        self, layers: Sequence[str], submit: Callable[[int], list[Handle[Copied]]]
    ) -> None:
        """*submit* begins the jobs of the layer with that index."""
        self._index = {name: i for i, name in enumerate(layers)}
        self._submit = submit
        self._handles: dict[int, list[Handle[Copied]]] = {}  # by layer

    def start(self, layer: str) -> None:
        """Begin the jobs of *layer*, if that is a layer with a cache of its own and not begun."""
        index = self._index.get(layer)
        if index is not None and index not in self._handles:
            self._handles[index] = self._submit(index)

    def start_all(self) -> None:
        """Begin those that are not begun, in the order in which a forward needs them."""
        for layer in self._index:
            self.start(layer)

    def of(self, layer: str) -> list[Handle[Copied]]:
        """What *layer* has to wait for: all, if it is unknown and may use another's cache."""
        index = self._index.get(layer)
        return self.all() if index is None else self._handles[index]

    def all(self) -> list[Handle[Copied]]:
        return [handle for handles in self._handles.values() for handle in handles]


class Admitted(NamedTuple):
    """A request that vLLM admitted to a step, and its device blocks then."""

    request: Request
    block_ids: Callable[[], BlockIds]


def take_back(admitted: Sequence[Admitted], failed: set[int], device_tokens: int) -> bool:
    """Have each of *admitted* computed from the first of the *failed* device blocks on.

    vLLM does so for the first request that has them, and takes those that share them for computed:
    which they are only once the first one has come so far. Returns whether a forward has used any
    of them, be it of a request that has ended by now.
    """
    were_used = False
    for request, block_ids in admitted:
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            continue
        first = next((i for i, block in enumerate(block_ids()[0]) if block in failed), None)
        if first is None:
            continue
        were_used = True
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens = min(request.num_computed_tokens, first * device_tokens)
    return were_used
