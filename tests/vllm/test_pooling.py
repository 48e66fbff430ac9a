"""A model that embeds prompts, with and without blocks of before."""

import math
import random
from pathlib import Path

import pytest
from tests.vllm.cpu import FP8_RUNS_HERE
from tests.vllm.engine import Ask, CacheServer, Engine
from tests.vllm.oracle import VOCABULARY, random_prompt
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvstrata.core.load import load_config
from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK = 64
PROMPT_TOKENS = 300


def write_tokenizer(folder: Path) -> None:
    """vLLM wants one to pool, though the prompts are tokens."""
    words = WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="w0").save_pretrained(
        folder
    )


def test_embeddings_are_the_same_with_blocks_of_before(tmp_path: Path) -> None:
    """A causal model with a KV head for each head (MHA), and the other fp8 type."""
    model = write_tiny_llama(tmp_path / "tiny-mha", TinyLlama(dtype="float32", kv_heads=8))
    write_tokenizer(model)
    transfer = {
        "kv_role": "kv_both",
        "engine_id": f"pooling-{random.randrange(1 << 30)}",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "server": "attached",
            "socket": str(tmp_path / "server.socket"),
            "recompute": "never",
            "tokens_per_block": TOKENS_PER_BLOCK,
            "lookup_timeout_seconds": 30,
            "load_timeout_seconds": 30,
            "save_timeout_seconds": 30,
        },
    }
    settings = {
        "runner": "pooling",
        "kv_cache_dtype": "fp8_e5m2" if FP8_RUNS_HERE else "auto",
        "skip_tokenizer_init": False,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
    }
    asks = [Ask(f"pool-{i}", random_prompt(random.Random(i), PROMPT_TOKENS)) for i in range(3)]
    config = load_config({"tiers": "host:64MiB"})
    with (
        CacheServer(config, tmp_path / "server.socket", tmp_path / "server.log"),
        Engine(model, tmp_path / "pooling.log", transfer, settings) as engine,
    ):
        first = engine.run(asks)
        engine.reset_prefix_cache()
        again = engine.run(asks)
    whole = PROMPT_TOKENS // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
    for ask in asks:
        assert (first[ask.id].cached_tokens, again[ask.id].cached_tokens) == (0, whole)
        assert again[ask.id].embedding == pytest.approx(first[ask.id].embedding, abs=1e-5)
    vectors = [answer.embedding for answer in first.values()]
    assert all(math.dist(vectors[0], other) > 0.1 for other in vectors[1:])
