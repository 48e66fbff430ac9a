"""The keys that an engine of a namespace gives to the blocks of a prompt, made without the engine."""

from collections.abc import Mapping, Sequence
from math import gcd
from typing import Final

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

from kvstrata.core.errors import ConfigError
from kvstrata.core.types import BlockKey
from kvstrata.integration.vllm.blocks import key_of_hash
from kvstrata.integration.vllm.fingerprint import hash_seed

__all__ = ["PromptKeys"]

_NEEDED: Final = ("hash_algorithm", "hash_seed", "tokens_per_block", "device_block_tokens")


class PromptKeys:
    """Keys of prompts of tokens alone: without LoRA, images and salt."""

    def __init__(self, parts: Mapping[str, str]) -> None:
        """*parts* are those of the namespace.

        ``ConfigError`` if they are no engine's of ours, or if its hashes cannot be made here.
        """
        missing = [name for name in _NEEDED if name not in parts]
        if missing:
            raise ConfigError(
                f"the namespace does not say its {', '.join(missing)}",
                hint="start its engine, or name keys instead of prompts",
            )
        algorithm = parts["hash_algorithm"]
        self._hash = get_hash_fn_by_name(algorithm)
        seed, _ = hash_seed(algorithm)
        if seed != parts["hash_seed"]:
            raise ConfigError(
                f"block hashes of {algorithm!r} have another seed in the engine than here",
                hint="set PYTHONHASHSEED as for the engine, or --prefix-caching-hash-algo sha256 there",
            )
        init_none_hash(self._hash)
        sizes = parts["device_block_tokens"].split(",")  # of each KV cache group
        self._hash_tokens = gcd(*(int(size) for size in sizes))
        self._ratio = int(parts["tokens_per_block"]) // self._hash_tokens

    def of(self, tokens: Sequence[int]) -> list[BlockKey]:
        """The keys of the whole blocks of *tokens*."""
        hashes = []
        above = None
        for end in range(self._hash_tokens, len(tokens) + 1, self._hash_tokens):
            above = hash_block_tokens(self._hash, above, tokens[end - self._hash_tokens : end])
            hashes.append(bytes(above))
        return [key_of_hash(each) for each in hashes[self._ratio - 1 :: self._ratio]]
