"""Hot paths over whole prompts and traces: the matcher of blending, the simulator of `replay`."""

import itertools
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Final

from bench.blend_match import DOMAIN, Bed, Documents
from bench.operations.count import Count

from kvstrata.replay.cost import Costs, Model, Rates
from kvstrata.replay.formats import Reading, open_trace, sample_path
from kvstrata.replay.scan import scan
from kvstrata.replay.simulator import CachePlan, SimulatedCache
from kvstrata.replay.sizes import Sizes

__all__ = ["MOVED_BLOCKS", "blend_match", "replay"]

MOVED_BLOCKS: Final = "moved blocks"  # saved, written to disk, evicted

_TOKENS: Final = 16_384
_EVENTS: Final = 60
_MOST_BLOCKS: Final = 1 << 16


def blend_match(count: Count) -> Generator[None]:
    """A prompt of documents that were seen in others, with other text between them."""
    bed = Bed(capacity_tokens=1 << 20)
    documents = Documents(bed)
    documents.measure()
    prompt = documents.long_prompt(_TOKENS)
    while True:
        count(bed.index.match, DOMAIN, prompt)
        yield


def replay(count: Count) -> Generator[None]:
    """The first requests of the shipped sample, into tiers that are too small for them."""
    trace = open_trace(sample_path(), Reading())
    block_bytes = Model().bytes_per_block(trace.tokens_per_block)
    costs = Costs(Rates(), trace.tokens_per_block, block_bytes)
    sizes = Sizes(host_bytes=80 * block_bytes, disk_bytes=160 * block_bytes)
    with tempfile.TemporaryDirectory() as folder:
        events = list(itertools.islice(scan(trace, Path(folder)), _EVENTS))
    while True:
        cache = SimulatedCache(CachePlan("lru", sizes), costs, _MOST_BLOCKS)
        for event in events:
            count(cache.request, event)
        outcome = cache.outcome()
        assert min(outcome.host_hits, outcome.disk_hits, outcome.evicted_disk) > 0
        moved = outcome.saved + outcome.written + outcome.evicted_host + outcome.evicted_disk
        count.sample[MOVED_BLOCKS] += moved
        yield
