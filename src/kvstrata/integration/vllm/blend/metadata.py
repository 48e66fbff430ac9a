"""What the scheduler half tells the workers of blended requests."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvstrata.blend.plan import BlendPlan

__all__ = ["BlendConnectorMeta", "BlendRequestMeta"]


@dataclass(slots=True, eq=False)
class BlendRequestMeta:
    """One request to blend: where its reused KV comes from, and where all of it goes.

    ``plan.runs`` has start, length and delta of each run. The KV of a run begins at token
    ``first_row`` of the blocks in ``slots``, laid end to end.
    """

    request_id: str
    task_ids: list[int]  # of the leases of the slots
    tokens: NDArray[np.int32]  # (plan.prompt_tokens,)
    device_blocks: NDArray[np.int32]  # of the first plan.end tokens
    plan: BlendPlan
    slots: NDArray[np.int64]  # (n,)
    generations: NDArray[np.int64]  # (n,) what each slot's generation must be
    first_row: NDArray[np.int64]  # (runs,)
    ratio: float
    is_audited: bool  # its first token is also computed exactly
    awaits_load: bool  # its exact prefix comes as a load of the same step
    awaits_step: bool  # other requests may compute some of its exact prefix in the same step


@dataclass(slots=True)
class BlendConnectorMeta(KVConnectorMetadata):
    """The requests to begin in a step, and how many tokens may be moved and run for all in it.

    One that is run up to a layer counts as the share of the layers that it goes through.
    """

    requests: list[BlendRequestMeta] = field(default_factory=list)
    most_moved: int = 0
    most_run: int = 0
