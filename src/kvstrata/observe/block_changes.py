"""What happens to blocks in the tiers, as those hear it who follow a cache."""

from typing import Final, Literal, NamedTuple

from kvstrata.core.types import BLOCK_KEY_BYTES, BlockKey, NamespaceId

__all__ = ["Change", "ChangeKind", "ChangedTier", "keys_of"]

ChangeKind = Literal["stored", "removed", "cleared"]
ChangedTier = Literal["host", "disk", "remote", ""]

_STEP: Final = BLOCK_KEY_BYTES


class Change(NamedTuple):
    """One thing that happened to some blocks.

    ``stored`` and ``removed``: *keys*, side by side, can be had from *tier*, or can no more. Stored
    ones follow each other in a prompt, after *parent*, which is None for the beginning of a prompt
    and where the block before is not known. ``cleared``: whatever was told of *namespace* is void,
    in every tier; without a namespace whatever was told at all.
    """

    kind: ChangeKind
    namespace: NamespaceId | None
    tier: ChangedTier = ""
    keys: bytes = b""
    parent: BlockKey | None = None

    @property
    def blocks(self) -> int:
        return len(self.keys) // _STEP


def keys_of(keys: bytes) -> list[BlockKey]:
    """Keys that lie side by side, one by one."""
    return [keys[i : i + _STEP] for i in range(0, len(keys), _STEP)]
