"""Which requests run in the step that loads them, and which wait for their load.

With ``load_mode: auto`` those whose copy takes a moment. A request that waits costs the engine a step
without tokens, in which vLLM sleeps for a millisecond, and a message to the workers and back. A
short copy is done sooner than that by the engine's own thread, before the forward.
"""

import sys
from typing import Final

from vllm.config import VllmConfig

from kvstrata.core.config import Config
from kvstrata.integration.vllm.geometry import DeviceGeometry
from kvstrata.integration.vllm.layerwise import obstacle_to_taking_back

__all__ = ["AtOnce", "blocks_at_once"]

_STEP_BYTES: Final = 128 << 20  # that a step copies before its forward; its requests wait for it


def blocks_at_once(
    config: Config, vllm_config: VllmConfig, geometry: DeviceGeometry, block_bytes: int
) -> int:
    """How many blocks a step may load for requests that run in it."""
    if config.load_mode == "layerwise":
        return sys.maxsize
    is_on = (
        config.load_mode == "auto"
        and vllm_config.device_config.device_type == "cpu"
        and obstacle_to_taking_back(vllm_config, geometry) is None
    )
    return _STEP_BYTES // block_bytes if is_on else 0


class AtOnce:
    """How much more the step that is being scheduled may load for requests that run in it."""

    def __init__(self, most_blocks: int) -> None:
        self._most = most_blocks
        self._taken = 0

    @property
    def has_begun(self) -> bool:
        """Whether it loads anything so: vLLM's prefix cache has that already."""
        return self._taken > 0

    def fits(self, blocks: int) -> bool:
        return self._most > 0 and self._taken + blocks <= self._most

    def take(self, blocks: int) -> None:
        self._taken += blocks

    def end_step(self) -> None:
        self._taken = 0
