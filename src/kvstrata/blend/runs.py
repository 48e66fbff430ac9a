"""What a match gives: runs of a prompt whose KV is known, and where it is."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstrata.core.keys import KeyArray


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of tokens of a prompt (the target) that stand in prompts before it (the sources).

    They are in the order of the target and do not overlap. All arrays but the last two have one
    element a run. A run's KV lies in the blocks ``keys[key_offsets[i] : key_offsets[i + 1]]``,
    one after the other, from token ``skip[i]`` of the first one on.
    """

    start: NDArray[np.int64]  # position in the target
    length: NDArray[np.int64]  # tokens
    delta: NDArray[np.int64]  # position in the target less that in the source
    generation: NDArray[np.int8]  # 0: the KV is exact; 1: computed on blended context
    skip: NDArray[np.int64]  # tokens, less than a block
    key_offsets: NDArray[np.int64]  # shape (runs + 1,)
    keys: KeyArray
    tokens_per_block: int

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> NDArray[np.int64]:
        """Position in the target after the last token of each run."""
        return self.start + self.length

    @property
    def tokens(self) -> int:
        """How many tokens of the target are in a run."""
        return int(self.length.sum())
