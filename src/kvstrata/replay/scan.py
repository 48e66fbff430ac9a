"""The first reading of a trace: through the device cache into a spool."""

from pathlib import Path

from kvstrata.core.errors import ConfigError
from kvstrata.replay.device import DeviceCache
from kvstrata.replay.lines import OnRead
from kvstrata.replay.spool import Spool, SpoolWriter
from kvstrata.replay.trace import Kind, Trace

__all__ = ["scan"]


def scan(
    trace: Trace, directory: Path, *, device_blocks: int = 0, on_read: OnRead | None = None
) -> Spool:
    """Write *trace* into *directory* as a spool, with the hits of a device cache before us.

    What the device has does not depend on us: blocks that we load are on the device afterwards
    just as blocks that it computes. So it is found out once for all sizes and policies.
    """
    if device_blocks and trace.behind_device:
        raise ConfigError(
            "an event log holds only what the device cache has left over",
            hint="replay it without --device",
        )
    device = DeviceCache(device_blocks) if device_blocks else None
    with SpoolWriter(directory, trace.tokens_per_block) as writer:
        for request in trace.read(on_read):
            found = 0
            if device is not None and request.kind is not Kind.PUT:
                found = device.request(request.blocks)
            writer.add(request, found)
        spool = writer.finish()
    if not spool.lookup_blocks:
        raise ConfigError(
            f"the trace has no request that fills a block of {trace.tokens_per_block} tokens",
            hint="replay it in smaller blocks, or give another trace",
        )
    return spool
