"""Where the K and V of each token lie in a device page, learnt from the backend that writes them.

Backends lay pages out as their kernels like: on a CPU K is stored transposed, or packed in pairs.
vLLM offers a writer (``impl.do_kv_cache_update``) and no reader. So numbers are written, and
where they turn up is where the elements lie: this works for every layout that only moves elements.
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from vllm.model_executor.layers.attention import MLAAttention

from kvstrata.blend.attention import attend_by_position
from kvstrata.blend.position import PositionCorrector
from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.blend.elements import elements_of, scales_of
from kvstrata.integration.vllm.blend.moves import TokenMoves
from kvstrata.integration.vllm.blend.writers import writer_of
from kvstrata.integration.vllm.reach import Reach

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

__all__ = ["PageMap", "Queries", "Strides", "TokenPages", "learn_page_map"]

_UNTOUCHED: Final = -1
_SEED: Final = 0


@dataclass(frozen=True, slots=True)
class PageMap:
    """Elements of one layer's page, as an index into it."""

    keys: torch.Tensor  # int64 (tokens, heads, head size)
    values: torch.Tensor  # likewise; with MLA the head size is another


@dataclass(frozen=True, slots=True)
class Queries:
    """Of which tokens of a prompt they are; tensors on the device of the cache."""

    positions: torch.Tensor  # int64 (n,), ascending
    device_blocks: torch.Tensor  # int32, of the prompt at least up to the last of them
    first: int  # of the positions, known without waiting for the device
    last: int


class Strides(NamedTuple):
    """Where elements of a page lie in steps; in elements."""

    first: int
    token: int
    head: int
    element: int

    @classmethod
    def of(cls, places: torch.Tensor) -> "Strides | None":
        """Of one part of a `PageMap`; None if its elements lie otherwise."""
        first = places[0, 0, 0]
        # 0 of a dimension of one: kernels read what is a multiple of 16 apart in wider pieces.
        strides = [
            int(places.movedim(dim, 0)[1, 0, 0] - first) if count > 1 else 0
            for dim, count in enumerate(places.shape)
        ]
        each = (torch.arange(count, device=places.device) for count in places.shape)
        steps = torch.meshgrid(*each, indexing="ij")
        found = first + sum(stride * step for stride, step in zip(strides, steps, strict=True))
        is_found = min(strides) >= 0 and torch.equal(places, found)
        return cls(int(first), *strides) if is_found else None


class _Places:
    """Where a page has the K or the V of its tokens."""

    def __init__(self, places: torch.Tensor) -> None:
        """*places*: as in `PageMap`."""
        self._shape = places.shape
        self._where = Strides.of(places) or places.flatten()

    def read(self, pages: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
        """Of *chosen* ones of *pages*, (pages, elements): (chosen * tokens, heads, head size).

        Of all, in their own memory where that goes, if *chosen* is None.
        """
        if isinstance(self._where, torch.Tensor):
            pages = pages if chosen is None else pages.index_select(0, chosen)
            return pages.index_select(1, self._where).view(-1, *self._shape[1:])
        first, *strides = self._where
        view = pages.as_strided(
            (len(pages), *self._shape),
            (pages.stride(0), *strides),
            pages.storage_offset() + first,
        )
        return (view if chosen is None else view.index_select(0, chosen)).flatten(0, 1)


class TokenPages:
    """One layer's KV by token: read from pages as the store keeps them, written into slots.

    A slot of a token is its device block times ``tokens`` and its place in it, as in vLLM. What is
    given to be read or written may be on another device than the cache.
    """

    def __init__(
        self, attention: "Attention | MLAAttention", pages: torch.Tensor, page_map: PageMap
    ) -> None:
        """*pages*: uint8 (device blocks, page bytes), the memory of the layer's cache."""
        self._attention = attention
        self._elements = elements_of(attention)
        self._writer = writer_of(attention)
        self._pages = pages
        self.tokens = len(page_map.keys)
        self._keys, self._values = _Places(page_map.keys), _Places(page_map.values)

    @property
    def is_quantised(self) -> bool:
        """Whether the cache keeps less than what the model writes."""
        return self._elements.is_quantised

    @property
    def device(self) -> torch.device:
        return self._pages.device

    def move(self, pages: torch.Tensor, moves: TokenMoves, corrector: PositionCorrector) -> None:
        """Write tokens of *pages*, uint8 (pages, page bytes), to other places, keys turned."""
        pages = pages.to(self.device)
        keys, values = self._read_keys(pages), self._read_values(pages)
        keys, values = keys.index_select(0, moves.rows), values.index_select(0, moves.rows)
        self.write(moves.rotation(corrector).apply(keys), values, moves.slots)

    def attend(self, queries: torch.Tensor, of: Queries) -> torch.Tensor:
        """What *queries*, (n, heads, head size), make of the values: (n, heads, head size)."""
        reach = Reach(self._attention.sliding_window)
        first = reach.first_needed(of.first) // self.tokens
        keys, values = self.read_blocks(of.device_blocks[first : of.last // self.tokens + 1])
        first *= self.tokens
        end = of.last + 1 - first
        return attend_by_position(
            queries,
            keys[:end],
            values[:end],
            of.positions - first,
            self._attention.impl.scale,
            reach.window,
        )

    def copy_blocks(self, device_blocks: torch.Tensor) -> torch.Tensor:
        """The pages of the engine's own *device_blocks*: uint8 (blocks, page bytes)."""
        return self._pages.index_select(0, device_blocks.to(self.device))

    def read_blocks(self, device_blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the engine's own *device_blocks*, (blocks * tokens, heads, head size).

        Of the cache's dtype, or as float32 if that is quantised.
        """
        chosen = device_blocks.to(self.device)
        return self._read_keys(self._pages, chosen), self._read_values(self._pages, chosen)

    def read_multiplied(self, device_blocks: torch.Tensor) -> torch.Tensor:
        """What queries are multiplied with: K of *device_blocks*, (blocks * tokens, heads, size).

        With MLA the latent, and K behind it.
        """
        if not isinstance(self._attention, MLAAttention):
            return self._read_keys(self._pages, device_blocks.to(self.device))
        keys, latents = self.read_blocks(device_blocks)
        return torch.cat([latents, keys], -1)

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Both (tokens, heads, head size), of the dtype that is read; *slots* int64 (tokens,).

        A quantised cache keeps the nearest numbers that it can: those that were read, as they were.
        """
        key_scale, value_scale = scales_of(self._attention)
        self._writer.write(
            self._elements.to_write(keys, key_scale).contiguous(),
            self._elements.to_write(values, value_scale).contiguous(),
            slots.to(self.device),
        )

    def _read_keys(self, pages: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
        kept = self._keys.read(pages.view(self._elements.page_type), chosen)
        scale, _ = scales_of(self._attention)
        return self._elements.read(kept, scale)

    def _read_values(self, pages: torch.Tensor, chosen: torch.Tensor | None = None) -> torch.Tensor:
        kept = self._values.read(pages.view(self._elements.page_type), chosen)
        _, scale = scales_of(self._attention)
        return self._elements.read(kept, scale)


def learn_page_map(
    attention: "Attention | MLAAttention", pages: torch.Tensor, scratch_block: int, block_size: int
) -> PageMap:
    """Write numbers to *scratch_block* of *attention*'s cache and look where they are.

    Args:
        pages: uint8 (device blocks, page bytes), the memory of that cache.

    Raises:
        ConfigError: The backend has no writer, or one that does more than move elements, and
            quantise them as is known, or moves them within its attention, before which nobody
            could stop.
    """
    writer, kept = writer_of(attention), elements_of(attention)
    shapes = (block_size, *writer.key_shape), (block_size, *writer.value_shape)
    counts = [prod(shape) for shape in shapes]
    count = sum(counts)
    page = pages[scratch_block].view(kept.page_type)
    slots = scratch_block * block_size + torch.arange(block_size, device=page.device)

    def write(elements: torch.Tensor) -> None:
        parts = elements.to(page.dtype).split(counts)
        keys, values = (
            kept.to_write(kept.read(part.view(shape), scale), scale).contiguous()
            for part, shape, scale in zip(parts, shapes, scales_of(attention), strict=True)
        )
        writer.write(keys, values, slots)

    numbers = torch.arange(count, device=page.device)
    seen = torch.zeros(len(page), dtype=torch.int64, device=page.device)
    for shift in range(0, count.bit_length(), kept.digit_bits):
        page.fill_(_UNTOUCHED)
        write((numbers >> shift) % (1 << kept.digit_bits))
        seen += page.long() << shift  # what is untouched becomes negative
    places = (seen >= 0).nonzero().flatten()
    where = torch.zeros(count, dtype=torch.int64, device=page.device)
    where[seen[places].clamp(max=count - 1)] = places

    noise = torch.rand(count, generator=torch.Generator().manual_seed(_SEED))
    noise = (noise * (1 << kept.digit_bits)).to(page)
    write(noise)
    if len(places) != count or not torch.equal(page[where], noise):
        raise ConfigError(
            f"{type(attention.impl).__name__} does not keep the KV of layer {attention.layer_name} "
            "element by element",
            hint="set kv_cache_dtype to auto, or kv_connector to KVStrataConnector",
        )
    keys, values = (
        part.view(shape) for part, shape in zip(where.split(counts), shapes, strict=True)
    )
    return PageMap(keys, values)
