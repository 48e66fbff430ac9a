"""How far back a layer attends, and so which KV a request needs at a given length."""

from dataclasses import dataclass
from typing import Final

from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec

from kvstrata.core.errors import ConfigError

__all__ = ["UNLIMITED", "Reach"]


@dataclass(frozen=True, slots=True)
class Reach:
    """To the beginning of the prompt, over a window, or to the beginning of a chunk of it.

    vLLM lets go of the device blocks that are out of reach, and gives out none for them.

    >>> Reach().first_needed(100), Reach(window=32).first_needed(100), Reach(chunk=64).first_needed(100)
    (0, 69, 64)
    """

    window: int | None = None  # tokens, the one that attends included
    chunk: int | None = None  # tokens

    @classmethod
    def of(cls, spec: KVCacheSpec) -> "Reach":
        """Of a layer with *spec*, as vLLM manages its blocks."""
        if isinstance(spec, SlidingWindowSpec):
            return cls(window=spec.sliding_window)
        if isinstance(spec, ChunkedLocalAttentionSpec):
            return cls(chunk=spec.attention_chunk_size)
        return cls()

    @property
    def is_limited(self) -> bool:
        return self.window is not None or self.chunk is not None

    def first_needed(self, tokens: int) -> int:
        """The first position that the token after *tokens* others attends to."""
        if self.window is not None:
            return max(0, tokens - self.window + 1)
        if self.chunk is not None:
            return tokens // self.chunk * self.chunk
        return 0

    def holds(self, tokens_per_block: int, block_size: int) -> bool:
        """Whether all of a block is still there in the step that computes its last token.

        *block_size* are the tokens of a device block.
        """
        if self.chunk is not None:
            return self.chunk % tokens_per_block == 0
        return self.window is None or tokens_per_block <= max(self.window, block_size)

    def check(self, tokens_per_block: int, block_size: int) -> None:
        """``ConfigError`` unless a block of *tokens_per_block* can be saved whole."""
        if self.holds(tokens_per_block, block_size):
            return
        if self.window is not None:
            most = max(self.window // block_size, 1) * block_size
            raise ConfigError(
                f"tokens_per_block = {tokens_per_block} is more than the model's sliding window of "
                f"{self.window} tokens: a block would leave the window before it is complete",
                hint=f"set tokens_per_block to a multiple of {block_size} up to {most}",
            )
        raise ConfigError(
            f"tokens_per_block = {tokens_per_block} does not divide the model's attention chunks "
            f"of {self.chunk} tokens: a block would lose its beginning before it is complete",
            hint=f"set tokens_per_block to a multiple of {block_size} that divides {self.chunk}",
        )


UNLIMITED: Final = Reach()
