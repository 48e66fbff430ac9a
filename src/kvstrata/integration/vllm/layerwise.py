"""``load_mode: layerwise``: copies layer by layer, while the forward that they are for runs.

vLLM takes such loads as synchronous: it schedules the request in the step in which it is loaded. A
load that fails then has to be taken back after the forward, which vLLM can only do where no later
step has been scheduled meanwhile.
"""

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final, NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.request import Request, RequestStatus

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.blocks import BlockIds
from kvstrata.integration.vllm.geometry import DeviceGeometry
from kvstrata.transfer.guarded import Copied
from kvstrata.transfer.lanes import Handle
from kvstrata.transfer.layered import LayerGates

__all__ = [
    "Admitted",
    "LayerLoad",
    "LayerSaves",
    "Standing",
    "check_layerwise",
    "obstacle_to_taking_back",
    "standing_on",
    "take_back",
]

_BLOCKWISE: Final = "take load_mode away from --kv-transfer-config"


def check_layerwise(config: Config, vllm_config: VllmConfig, geometry: DeviceGeometry) -> None:
    """Raises ``ConfigError`` where vLLM could not take a failed load back."""
    if config.load_mode == "layerwise" and (
        obstacle := obstacle_to_taking_back(vllm_config, geometry)
    ):
        raise ConfigError(f"load_mode is 'layerwise' and {obstacle.why}", hint=obstacle.hint)


class Obstacle(NamedTuple):
    """Why a request cannot run in the step that loads it, and what to do about it."""

    why: str
    hint: str


def obstacle_to_taking_back(vllm_config: VllmConfig, geometry: DeviceGeometry) -> Obstacle | None:
    """What keeps vLLM from taking a load back that fails in the step in which its request runs."""
    if vllm_config.scheduler_config.async_scheduling:
        return Obstacle(
            "async scheduling is on: the next step would be "
            "scheduled before it is known whether this step's loads were whole",
            f"start vLLM with --no-async-scheduling, or {_BLOCKWISE}",
        )
    if (stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        return Obstacle(
            f"pipeline_parallel_size is {stages}: the next steps "
            "would be scheduled before it is known whether this step's loads were whole",
            f"set --pipeline-parallel-size to 1, or {_BLOCKWISE}",
        )
    if _has_siblings():
        return Obstacle(
            "there are other connectors beside this one: one of them may have a request wait for its "
            "own load on top of blocks that this one fails to load",
            _BLOCKWISE,
        )
    if vllm_config.use_v2_model_runner:
        return Obstacle(
            "vLLM runs the model with its V2 model runner, which goes on where it was: it does not "
            "compute again what the scheduler takes back",
            f"set VLLM_USE_V2_MODEL_RUNNER=0, or {_BLOCKWISE}",
        )
    if len(geometry.groups) > 1 or geometry.groups[0].reach.is_limited:
        return Obstacle(
            "the model has several KV cache groups, or layers with a "
            "sliding window or chunked attention: vLLM takes failed device blocks back only where "
            "it keeps those before them",
            _BLOCKWISE,
        )
    return None


def _has_siblings() -> bool:
    """Whether another connector is making this one right now: ``MultiConnector`` tells no child.

    vLLM takes back only requests that run, and not those that wait on the same device blocks.
    """
    connectors = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if KVConnectorBase_V1 in type(caller).__mro__:
            connectors.add(id(caller))
        frame = frame.f_back
    return len(connectors) > 1


class LayerLoad:
    """The loads of one step: a job that they share, and the gates that it opens."""

    def __init__(
        self, layers: Sequence[str], gates: LayerGates, handle: Handle[Copied] | None
    ) -> None:
        """*handle*: None if none of them could be begun."""
        self._index = {name: i for i, name in enumerate(layers)}
        self.gates = gates
        self.handle = handle

    def index(self, layer: str) -> int:
        """Which gate *layer* is behind: the last, if it is unknown and may use any's cache."""
        return self._index.get(layer, len(self._index) - 1)


class LayerSaves:
    """The saves of one step: a job for each layer, shared by the tasks."""

    def __init__(self, layers: Sequence[str], submit: Callable[[int], None]) -> None:
        """*submit* begins the job of the layer with that index."""
        self._left = {name: i for i, name in enumerate(layers)}
        self._submit = submit

    def start(self, layer: str) -> None:
        """Begin the job of *layer*, if that is a layer with a cache of its own and not begun."""
        index = self._left.pop(layer, None)
        if index is not None:
            self._submit(index)

    def start_all(self) -> None:
        """Begin those that are not begun."""
        for layer in list(self._left):
            self.start(layer)


class Admitted(NamedTuple):
    """A request that vLLM admitted to a step, and its device blocks then."""

    request: Request
    block_ids: Callable[[], BlockIds]


class Standing(NamedTuple):
    """A request whose forward has used device blocks that are not what they should be."""

    request: Request
    first_block: int  # of its own, in its prompt


def standing_on(admitted: Sequence[Admitted], failed: set[int]) -> list[Standing]:
    """Which of *admitted* have used *failed* device blocks, also those that have ended by now."""
    standing = []
    for request, block_ids in admitted:
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            continue
        first = next((i for i, block in enumerate(block_ids()[0]) if block in failed), None)
        if first is not None:
            standing.append(Standing(request, first))
    return standing


def take_back(standing: Sequence[Standing], device_tokens: int) -> None:
    """Have each of *standing* that still runs computed from the first failed device block on.

    vLLM does so for the first request that has them, and takes those that share them for computed:
    which they are only once the first one has come so far.
    """
    for request, first_block in standing:
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens = min(
                request.num_computed_tokens, first_block * device_tokens
            )
