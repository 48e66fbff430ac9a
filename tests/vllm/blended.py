"""An engine with ``BlendConnector`` that knows some documents."""

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.vllm.engine import Act, Answer, Ask, Engine, wait_for_worker
from tests.vllm.oracle import Oracle, random_prompt

BLOCK_TOKENS = 32
Prompt = tuple[int, ...]


@dataclass
class Subject:
    """An engine that knows some documents, each from a prompt of its own behind one system prompt."""

    engine: Engine
    oracle: Oracle
    rng: random.Random
    system: Prompt
    documents: list[Prompt]
    asked: int = 0

    def text(self, tokens: int) -> Prompt:
        return random_prompt(self.rng, tokens)

    def prompt(self, *documents: int) -> Prompt:
        """Documents in another place and order than before, behind the same system prompt."""
        parts = [part for d in documents for part in (self.documents[d], self.text(3))]
        return sum(parts, self.system) + self.text(40)

    def ask(self, prompt: Prompt, blend: object, tokens: int = 8) -> Ask:
        self.asked += 1
        return Ask(f"blend-{self.asked}", prompt, tokens, transfer={"blend": blend})

    def mix(
        self, requests: int = 6, *, resets: int = 1, logits: bool = False
    ) -> tuple[list[Ask], list[Act]]:
        """Requests that arrive one after the other while others are aborted or preempted.

        *logits*: of those that are exact.
        """
        rng, asks = self.rng, []
        for i in range(requests):
            prompt = self.prompt(*rng.sample(range(4), rng.randrange(1, 4)))
            blend = rng.choice([False, {"ratio": 1.0}, {"ratio": 0.0}, True])
            ask = self.ask(prompt, blend, tokens=rng.randrange(1, 30))
            asks.append(replace(ask, at_step=4 * i, logits=logits and is_exact(ask)))
        acts = [Act("abort", ask.id, ask.at_step + rng.randrange(9)) for ask in rng.sample(asks, 2)]
        acts += [Act("reset", "running", at_step=rng.randrange(35)) for _ in range(resets)]
        return asks, acts

    def run(self, asks: Sequence[Ask], *acts: Act) -> dict[str, Answer]:
        return self.engine.run([*asks, *acts])

    def one(self, prompt: Prompt, blend: object) -> Answer:
        ask = self.ask(prompt, blend)
        return self.run([ask])[ask.id]

    def count(self, name: str, result: str | None = None) -> float:
        """The counter ``kvstrata_blend_`` *name* of the engine, of all results or one."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.engine.exposition())
            for sample in family.samples
            if sample.name == f"kvstrata_blend_{name}"
            and result in (None, sample.labels.get("result"))
        )

    def reused_tokens(self) -> float:
        """How many tokens blended requests have taken from elsewhere so far."""
        name = "kvstrata_blend_tokens_total"
        families = text_string_to_metric_families(self.engine.exposition())
        samples = [s for family in families for s in family.samples if s.name == name]
        return sum(s.value for s in samples if "reused" in s.labels.values())

    def exact(self, prompt: Prompt) -> Answer:
        """The answer to *prompt* without blending, which must be that of vLLM alone."""
        ask = self.ask(prompt, blend=False)
        answers = self.run([ask])
        self.oracle.check([ask], answers)
        return answers[ask.id]


@contextmanager
def blending(
    model: Path,
    oracle: Oracle,
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Iterator[Subject]:
    rng = random.Random(20261123)
    transfer = {
        "kv_connector": "BlendConnector",
        "kv_connector_module_path": "kvstrata.integration.vllm.blend.connector",
        "kv_role": "kv_both",
        "engine_id": f"{folder.name}-{os.getpid()}-{random.SystemRandom().randrange(1 << 30)}",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": "host:256MiB",
            "recompute": "never",
            "blend_min_saved_tokens": 0,
            "blend_min_saved_share": 0,
            "blend_if_slower": True,
            "blend_audit_share": 0.25,
            "blend_audit_limit": 100,
            "lookup_timeout_seconds": 30,
            "load_timeout_seconds": 30,
            "save_timeout_seconds": 30,
            **(extra or {}),
        },
    }
    with Engine(
        model, folder / "log", transfer, settings or {}, environment=environment or {}
    ) as engine:
        engine.wait_ready()
        workers = (settings or {}).get("tensor_parallel_size", 1)
        wait_for_worker(str(transfer["engine_id"]), workers=workers)
        system = random_prompt(rng, 2 * BLOCK_TOKENS)
        documents = [random_prompt(rng, 150 + 37 * i) for i in range(4)]
        made = Subject(engine, oracle, rng, system, documents)
        for document in documents:
            made.exact(system + document + made.text(9))
        engine.reset_prefix_cache()
        yield made


def is_exact(ask: Ask) -> bool:
    """Whether nothing of the answer may be approximate."""
    return (ask.transfer or {})["blend"] in (False, {"ratio": 1.0})


def whole_blocks(prompt: Prompt) -> int:
    """Tokens of the blocks before the last token."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
