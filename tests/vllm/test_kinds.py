"""Requests that differ in more than their tokens, fp8 caches, engines that share a server.

Two engines with an MQA model or a GQA one, an fp8 KV cache where the CPU can have one, adapters and prompt embeddings are
attached to one server, as the ranks of a data parallel deployment are: each keeps the session name vLLM gives it.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.vllm.cpu import FP8_RUNS_HERE
from tests.vllm.engine import Answer, Ask, CacheServer, Engine, transfer_config
from tests.vllm.oracle import random_prompt

from kvstrata.core.load import load_config
from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK = 64
PROMPT_TOKENS = 300
WHOLE = PROMPT_TOKENS // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK
MODELS = {
    "mqa": TinyLlama(dtype="float32", kv_heads=1),
    "gqa": TinyLlama(dtype="float32", kv_heads=4),
}
NEW_TOKENS = 8


def write_adapter(folder: Path, model: TinyLlama, seed: int) -> str:
    """A LoRA adapter of *model* that changes what its attention looks at, and what it finds."""
    folder.mkdir()
    rank, dim = 8, model.head_dim
    shapes = {"q_proj": model.heads * dim, "v_proj": model.kv_heads * dim}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(shapes),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(model.layers):
        for name, rows in shapes.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(rank, model.hidden_size, generator=generator)
            up = torch.randn(rows, rank, generator=generator)
            tensors[f"{path}.lora_A.weight"] = down / model.hidden_size**0.5
            tensors[f"{path}.lora_B.weight"] = up / rank**0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def transfer_to(socket: Path, name: str) -> dict[str, Any]:
    return transfer_config(name, TOKENS_PER_BLOCK, server="attached", socket=str(socket))


@dataclass
class Pair:
    """Two engines of one deployment. Every prompt is asked with an empty device cache."""

    model: TinyLlama
    engines: list[Engine]
    folder: Path

    def answers(self, ask: Ask) -> Iterator[Answer]:
        """Of the engine that computes it, of the same again, and of the other."""
        for i, engine in enumerate((self.engines[0], self.engines[0], self.engines[1])):
            engine.reset_prefix_cache()  # waits until the last answer is saved
            once = replace(ask, id=f"{ask.id}-{i}")
            yield engine.run([once])[once.id]

    def embeddings(self, name: str, seed: int) -> str:
        generator = torch.Generator().manual_seed(seed)
        file = self.folder / name
        torch.save(torch.randn(PROMPT_TOKENS, self.model.hidden_size, generator=generator), file)
        return str(file)


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(f"kinds-{request.param}")
    model = MODELS[request.param]
    path = write_tiny_llama(folder / "model", model)
    socket = folder / "server.socket"
    settings = {
        "kv_cache_dtype": "fp8" if FP8_RUNS_HERE else "auto",
        "enable_lora": True,
        "max_loras": 2,
        "enable_prompt_embeds": True,
    }
    name = f"kinds-{random.randrange(1 << 30)}"
    config = load_config({"tiers": "host:64MiB"})
    with CacheServer(config, socket, folder / "server.log") as server:
        engines = [
            Engine(
                path,
                folder / f"dp{i}.log",
                transfer_to(server.socket, f"{name}_dp{i}"),
                settings,
            )
            for i in range(2)
        ]
        with engines[0], engines[1]:
            yield Pair(model, engines, folder)


def check_apart(pair: Pair, asks: list[Ask]) -> None:
    """None finds blocks of another; each finds its own, from either engine; all differ."""
    told = set()
    for ask in asks:
        first, again, other = pair.answers(ask)
        found = [answer.cached_tokens for answer in (first, again, other)]
        assert found == [0, WHOLE, WHOLE], ask.id
        assert first.tokens == again.tokens == other.tokens, ask.id
        assert len(first.tokens) == NEW_TOKENS
        told.add(tuple(first.tokens))
    expected = len({(ask.prompt, ask.lora, ask.embeds) for ask in asks})  # a salt changes no token
    assert len(told) == expected


def test_adapters_and_salts_keep_equal_prompts_apart(pair: Pair) -> None:
    prompt = random_prompt(random.Random(1), PROMPT_TOKENS)
    one, two = (write_adapter(pair.folder / f"adapter-{i}", pair.model, i) for i in (1, 2))
    check_apart(
        pair,
        [
            Ask("base", prompt, NEW_TOKENS),
            Ask("one", prompt, NEW_TOKENS, lora=one),
            Ask("two", prompt, NEW_TOKENS, lora=two),
            Ask("mine", prompt, NEW_TOKENS, salt="mine"),
            Ask("theirs", prompt, NEW_TOKENS, salt="theirs"),
            Ask("both", prompt, NEW_TOKENS, salt="mine", lora=one),
        ],
    )


def test_prompts_without_tokens_are_known_by_their_embeddings(pair: Pair) -> None:
    embeds = [pair.embeddings(f"embeds-{i}", i) for i in (1, 2)]
    asks = [Ask(f"embeds-{i}", (), NEW_TOKENS, embeds=file) for i, file in enumerate(embeds)]
    # vLLM counts such a prompt as so many zeros.
    check_apart(pair, [*asks, Ask("zeros", (0,) * PROMPT_TOKENS, NEW_TOKENS)])
