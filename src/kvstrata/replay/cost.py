"""What computing and loading blocks takes, by rates that the caller knows or assumes."""

from dataclasses import dataclass

from kvstrata.core.layout import ElementType, KVCacheLayout, KVCacheLayoutType

__all__ = ["Costs", "Model", "Rates"]


@dataclass(frozen=True, slots=True)
class Model:
    """How large the KV of a token is. The default is Llama-3.1-8B's: 128 KiB.

    >>> Model().bytes_per_block(512), Model(kv_bytes_per_token=1000).bytes_per_block(16)
    (67108864, 16000)
    """

    layers: int = 32
    kv_heads: int = 8  # of all ranks together
    head_size: int = 128
    dtype: str = "bfloat16"
    is_mla: bool = False
    kv_bytes_per_token: int | None = None  # instead of all that

    def bytes_per_block(self, tokens: int) -> int:
        """Of a block of so many *tokens*, all layers and ranks."""
        if self.kv_bytes_per_token is not None:
            return tokens * self.kv_bytes_per_token
        layout = KVCacheLayout(
            KVCacheLayoutType.BLOCKWISE,
            self.layers,
            num_block=1,
            tokens_per_block=tokens,
            num_head=self.kv_heads,
            head_size=self.head_size,
            is_mla=self.is_mla,
        )
        return layout.bytes_per_block(ElementType.named(self.dtype))


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast one engine computes and loads. The defaults are assumptions, not measurements.

    Llama-3.1-8B on one H100: 2 operations for each of 8.0e9 weights, at a third of the 989e12 a
    second that it can do in bfloat16, are 20,000 tokens a second. Attention of 32 layers, 4096
    wide, is 4 * 32 * 4096 operations for each token before: as many as the weights at 30,000.
    """

    prefill_tokens_per_second: float = 20_000  # of a short prompt
    attention_tokens: float = 30_000  # context at which attention takes as long as all else
    host_bytes_per_second: float = 20e9  # host memory to device
    disk_bytes_per_second: float = 3e9  # disk to host memory


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds for blocks of one size.

    >>> rates = Rates(1000.0, 4000.0, 20e9, 2e9)
    >>> costs = Costs(rates, tokens_per_block=1000, block_bytes=1 << 20)
    >>> costs.prefill_seconds(0, 1), costs.prefill_seconds(3, 4)
    (1.125, 1.875)
    """

    rates: Rates
    tokens_per_block: int
    block_bytes: int

    def prefill_seconds(self, first: int, end: int) -> float:
        """To compute blocks *first* to *end* of a prompt: the later, the more there is to attend to."""
        begin, stop = first * self.tokens_per_block, end * self.tokens_per_block
        attended = (stop * stop - begin * begin) / (2 * self.rates.attention_tokens)
        return (stop - begin + attended) / self.rates.prefill_tokens_per_second

    def host_seconds(self, blocks: int) -> float:
        """To copy *blocks* from host memory to the device."""
        return blocks * self.block_bytes / self.rates.host_bytes_per_second

    def disk_seconds(self, blocks: int) -> float:
        """To read *blocks* from disk into host memory."""
        return blocks * self.block_bytes / self.rates.disk_bytes_per_second
