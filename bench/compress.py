"""Compression and 8-bit quantisation of KV blocks: room and speed, next to a copy.

    python bench/compress.py [--tokens 1024] [--repetitions 15]

Two kinds of blocks, of 64 tokens, all layers, K and V, in bf16:

* forward: the KV cache of a real forward pass of transformers' Llama on the CPU, with random
  weights and random tokens. No trained model: a trained one has outlier channels.
* random: normally distributed numbers.

Everything goes through the stores, over a dict (with a copy and a checksum of its own). Each
repetition asks all contenders in turn; times are medians, on one thread.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import zstandard
from transformers import LlamaForCausalLM

from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama
from kvstrata.storage.compress import FRAME_OVERHEAD_BYTES, CompressedStore
from kvstrata.storage.quantize import QuantizedStore, quantized_bytes
from kvstrata.storage.store import Store
from kvstrata.testing import MemoryStore

TOKENS_PER_BLOCK = 64
MODEL = TinyLlama(
    hidden_size=512, intermediate_size=1024, layers=8, heads=8, kv_heads=8, head_dim=64
)

Block = np.ndarray[Any, np.dtype[np.uint8]]


class Contender(NamedTuple):
    name: str
    write: Callable[[memoryview], None]
    read: Callable[[memoryview], None]
    kept_bytes: Callable[[], int]


def forward_blocks(tokens: int) -> list[Block]:
    """The KV cache of one prompt, one array [layer, kv, token, head, dim] of bytes for a block."""
    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM.from_pretrained(
            write_tiny_llama(Path(folder), MODEL), dtype=torch.bfloat16
        )
    prompt = torch.randint(
        MODEL.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        cache = model(prompt, use_cache=True).past_key_values
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    whole = torch.stack(layers).transpose(2, 3)  # [layer, kv, token, head, dim]
    return [
        whole[:, :, first : first + TOKENS_PER_BLOCK].contiguous().view(torch.uint8).numpy().ravel()
        for first in range(0, tokens, TOKENS_PER_BLOCK)
    ]


def random_blocks(count: int, block_bytes: int) -> list[Block]:
    numbers = torch.randn(count, block_bytes // 2, generator=torch.Generator().manual_seed(2))
    return list(numbers.to(torch.bfloat16).view(torch.uint8).numpy())


def through(name: str, inner: MemoryStore, store: Store) -> Contender:
    key = b"k" * 48

    def write(block: memoryview) -> None:
        inner.values.clear()
        store.write([key], [None], [block])

    return Contender(
        name,
        write,
        lambda block: (store.read_into([key], [block]), None)[1],
        lambda: len(inner.values[key].content),
    )


def plain_zstd() -> Contender:
    kept: list[bytes] = [b""]
    coder, decoder = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def write(block: memoryview) -> None:
        kept[0] = coder.compress(block)

    def read(block: memoryview) -> None:
        block[:] = decoder.decompress(kept[0])

    return Contender("zstd -1 alone", write, read, lambda: len(kept[0]))


def copy(block_bytes: int) -> Contender:
    kept = memoryview(bytearray(block_bytes))

    def write(block: memoryview) -> None:
        kept[:] = block

    def read(block: memoryview) -> None:
        block[:] = kept

    return Contender("copy", write, read, lambda: block_bytes)


def contenders(block_bytes: int) -> list[Contender]:
    def memory(inner_bytes: int) -> MemoryStore:
        return MemoryStore(block_bytes=inner_bytes, capacity_blocks=1, variable=True)

    plain = memory(block_bytes)
    compressed = memory(block_bytes + FRAME_OVERHEAD_BYTES)
    quantized = memory(quantized_bytes(block_bytes, "bfloat16"))
    return [
        copy(block_bytes),
        through("dict", plain, plain),
        plain_zstd(),
        through("compressed", compressed, CompressedStore(compressed, 2)),
        through(
            "quantised",
            quantized,
            QuantizedStore(quantized, "bfloat16", block_bytes=block_bytes),
        ),
    ]


def seconds(call: Callable[[memoryview], None], block: memoryview) -> float:
    start = time.perf_counter()
    call(block)
    return time.perf_counter() - start


def noise_decibels(block: Block, read: Block) -> float:
    before, after = (torch.from_numpy(each).view(torch.bfloat16).double() for each in (block, read))
    noise = ((before - after) ** 2).sum()
    return float(10 * torch.log10((before**2).sum() / noise)) if noise else float("inf")


def measure(kind: str, blocks: list[Block], repetitions: int) -> None:
    block_bytes = blocks[0].nbytes
    rivals = contenders(block_bytes)
    writes: dict[str, list[float]] = {rival.name: [] for rival in rivals}
    reads: dict[str, list[float]] = {rival.name: [] for rival in rivals}
    kept = dict.fromkeys(writes, 0)
    signal = dict.fromkeys(writes, float("inf"))
    buffer = np.full(block_bytes, 0xEE, np.uint8)
    for repetition in range(repetitions):
        block = blocks[repetition % len(blocks)]
        for rival in rivals[repetition % len(rivals) :] + rivals[: repetition % len(rivals)]:
            writes[rival.name].append(seconds(rival.write, block.data))
            reads[rival.name].append(seconds(rival.read, buffer.data))
            kept[rival.name] += rival.kept_bytes()
            signal[rival.name] = min(signal[rival.name], noise_decibels(block, buffer))
    print(f"\n{kind}: {len(blocks)} blocks of {block_bytes / 2**20:.2f} MiB, bf16")
    print(f"{'':14} {'kept':>6} {'write GB/s':>11} {'of copy':>8} {'read GB/s':>10} {'of copy':>8}")
    for rival in rivals:
        write, read = (statistics.median(times[rival.name]) for times in (writes, reads))
        copied, copied_back = (statistics.median(times["copy"]) for times in (writes, reads))
        db = signal[rival.name]
        print(
            f"{rival.name:14} {kept[rival.name] / repetitions / block_bytes:6.3f} "
            f"{block_bytes / write / 1e9:11.2f} {copied / write:8.1%} "
            f"{block_bytes / read / 1e9:10.2f} {copied_back / read:8.1%}  "
            + ("exact" if db == float("inf") else f"signal to noise {db:.1f} dB")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    blocks = forward_blocks(arguments.tokens)
    measure(
        "forward (transformers' Llama, random weights, random tokens)",
        blocks,
        arguments.repetitions,
    )
    measure(
        "random (normally distributed)",
        random_blocks(len(blocks), blocks[0].nbytes),
        arguments.repetitions,
    )


if __name__ == "__main__":
    main()
