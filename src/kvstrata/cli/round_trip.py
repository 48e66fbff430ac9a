"""Save a few blocks and load them again, as an engine would."""

import secrets
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from kvstrata.core.config import Config
from kvstrata.core.errors import InvariantViolated, TierUnavailable
from kvstrata.core.limits import nearest_existing
from kvstrata.core.remote_tiers import MooncakeTier, RemoteTier
from kvstrata.core.tiers import DiskTier, HostTier
from kvstrata.core.types import (
    BLOCK_KEY_BYTES,
    NAMESPACE_ID_BYTES,
    STORE_KEY_BYTES,
    Read,
    Write,
)
from kvstrata.manager.manager import KVManager
from kvstrata.manager.tasks import TaskState
from kvstrata.storage.remote.open import open_remote

__all__ = ["PROBE_BLOCK_BYTES", "ask_remote", "remote_round_trip", "round_trip"]

PROBE_BLOCK_BYTES: Final = 64 * 1024
_PROBE_BLOCKS: Final = 4
_PROBE_TIER_BYTES: Final = 4 * _PROBE_BLOCKS * PROBE_BLOCK_BYTES
_PROBE_SECONDS: Final = 10.0
_JOIN_SECONDS: Final = 0.2
_SERVERS: Final = "look at the servers of the cluster: which of them are down, and in its state"
_ROOM: Final = {
    "objects": "make room, for example with kvstrata gc, or raise the quota",
    "valkey": "raise maxmemory of the server, or have it evict (maxmemory-policy allkeys-lru)",
    "mooncake": "start nodes with segments in the pool, or give it one of this node (segment)",
}


def round_trip(config: Config) -> str:
    """Save blocks in small tiers like those of *config* and load them again; what was seen.

    With a disk tier the manager is restarted in between, so that the bytes come from disk. The
    tiers and the event log of *config* themselves are not touched.

    Raises:
        KVStrataError: a step failed, or the bytes that came back are others.
    """
    disk = config.disk_tier
    began = time.monotonic()
    if disk is None:
        _save_and_load(_small(config, None), restart=False)
    else:
        with tempfile.TemporaryDirectory(
            prefix=".kvstrata-doctor-", dir=nearest_existing(disk.paths[0])
        ) as directory:
            _save_and_load(_small(config, Path(directory, "blocks")), restart=True)
    through = "host memory" if disk is None else "host memory, disk and a restart"
    milliseconds = (time.monotonic() - began) * 1000
    return f"{_PROBE_BLOCKS} blocks came back unchanged through {through} in {milliseconds:.0f} ms"


class RemoteTrip(NamedTuple):
    """How long it took to write a block, to read it and to remove it, and to look for it alone."""

    seconds: float
    lookup_seconds: float


def ask_remote(tier: RemoteTier) -> None:
    """Look for a block that nobody has; ``TierUnavailable`` where the engine cannot be used.

    It joins no pool with memory of this node, which would leave it a moment later.
    """
    if isinstance(tier, MooncakeTier):
        tier = tier.model_copy(update={"segment": None})
    with closing(open_remote(tier, block_bytes=PROBE_BLOCK_BYTES, memory=None)) as store:
        store.exists([secrets.token_bytes(STORE_KEY_BYTES)])


def remote_round_trip(tier: RemoteTier) -> RemoteTrip:
    """Write a block to the engine of *tier*, look for it, read it and remove it again.

    Raises:
        TierUnavailable: the engine cannot be used.
        KVStrataError: a step failed, or the bytes that came back are others.
    """
    key = secrets.token_bytes(STORE_KEY_BYTES)
    block, buffer = secrets.token_bytes(PROBE_BLOCK_BYTES), bytearray(PROBE_BLOCK_BYTES)
    with closing(open_remote(tier, block_bytes=PROBE_BLOCK_BYTES, memory=None)) as store:
        began = time.monotonic()
        while (written := store.write([key], [None], [memoryview(block)])[0]) is Write.FULL:
            if time.monotonic() - began > _PROBE_SECONDS:
                break
            time.sleep(_JOIN_SECONDS)  # what this node gives to a pool may not have joined it yet
        if written is Write.FAILED:
            raise TierUnavailable(
                "the server that a block belongs to does not serve it", hint=_SERVERS
            )
        if written is not Write.STORED:
            raise TierUnavailable(
                f"it has no room for a block ({written.value})", hint=_ROOM[tier.kind], cause="full"
            )
        asked = time.monotonic()
        store.exists([key])
        lookup_seconds = time.monotonic() - asked
        (read,) = store.read_into([key], [memoryview(buffer)])
        store.remove([key])
        seconds = time.monotonic() - began
    if read is not Read.HIT or buffer != block:
        raise InvariantViolated(f"the block that was written comes back as a {read.value}")
    return RemoteTrip(seconds, lookup_seconds)


def _small(config: Config, directory: Path | None) -> Config:
    host = HostTier(capacity=_PROBE_TIER_BYTES)
    disk = () if directory is None else (DiskTier(paths=(directory,), capacity=_PROBE_TIER_BYTES),)
    nothing_told = {"event_log": None, "kv_events": None, "kv_events_replay": None}
    apart = {"tiers": (host, *disk), "prefault": False, **nothing_told}
    return config.model_copy(update=apart)


def _save_and_load(config: Config, *, restart: bool) -> None:
    namespace = secrets.token_bytes(NAMESPACE_ID_BYTES)
    blocks = {
        secrets.token_bytes(BLOCK_KEY_BYTES): secrets.token_bytes(PROBE_BLOCK_BYTES)
        for _ in range(_PROBE_BLOCKS)
    }
    with closing(KVManager(config, block_bytes=PROBE_BLOCK_BYTES)) as manager:
        _save(manager, namespace, blocks)
        if not restart:
            _load(manager, namespace, blocks)
    if restart:
        with closing(KVManager(config, block_bytes=PROBE_BLOCK_BYTES)) as manager:
            _load(manager, namespace, blocks)


def _save(manager: KVManager, namespace: bytes, blocks: Mapping[bytes, bytes]) -> None:
    task = manager.put_match(namespace, list(blocks))
    if len(task.slots) != len(blocks):
        raise TierUnavailable(f"room for {len(task.slots)} of {len(blocks)} blocks was given")
    manager.launch([task.task_id])
    for slot, block in zip(task.slots, blocks.values(), strict=True):
        manager.view(slot)[:] = block
    manager.complete([task.task_id])


def _load(manager: KVManager, namespace: bytes, blocks: Mapping[bytes, bytes]) -> None:
    asked = manager.get_match(namespace, list(blocks))
    task = manager.wait([asked.task_id], _PROBE_SECONDS).get(asked.task_id, asked)
    if task.state is not TaskState.READY or len(task.slots) != len(blocks):
        raise TierUnavailable(
            f"{len(task.slots)} of {len(blocks)} saved blocks were found again ({task.state.value})"
        )
    manager.launch([task.task_id])
    same = all(
        bytes(manager.view(slot)) == block
        for slot, block in zip(task.slots, blocks.values(), strict=True)
    )
    manager.complete([task.task_id])
    if not same:
        raise InvariantViolated("the bytes that came back are not those that were saved")
