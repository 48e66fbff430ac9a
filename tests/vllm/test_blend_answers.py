"""A trained model, asked in vLLM for what one document says in the light of others."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from bench.blend.checkpoint import SHIPPED
from bench.blend.task import BOS, DOCUMENT_TOKENS, FILLER, Kind, Prompts, make_prompts
from prometheus_client.parser import text_string_to_metric_families
from tests.vllm.engine import Ask, Engine

pytestmark = pytest.mark.vllm

DOCUMENTS = 6
PROMPTS = 256
BLOCK_TOKENS = 32  # the least that vLLM's attention on a CPU takes


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """That computes so many first tokens of each run anew, and by these layers, if any are named."""
    first_tokens, *layers = request.param
    folder = tmp_path_factory.mktemp("answers")
    transfer = {
        "kv_connector": "BlendConnector",
        "kv_connector_module_path": "kvstrata.integration.vllm.blend.connector",
        "kv_role": "kv_both",
        "engine_id": f"{folder.name}-{random.SystemRandom().randrange(1 << 30)}",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": "host:512MiB",
            "tokens_per_block": BLOCK_TOKENS,
            "recompute": "never",
            "blend_chunk_size": 16,
            "blend_min_saved_tokens": 0,
            "blend_min_saved_share": 0,
            "blend_if_slower": True,
            "recompute_first_tokens": first_tokens,
            "blend_scored_layers": layers,
            "blend_audit_share": 0,
            "lookup_timeout_seconds": 30,
            "load_timeout_seconds": 30,
            "save_timeout_seconds": 30,
        },
    }
    settings = {"block_size": BLOCK_TOKENS, "max_model_len": 512, "num_gpu_blocks_override": 200}
    with Engine(SHIPPED, folder / "log", transfer, settings) as started:
        yield started


def questions() -> Prompts:
    """Prompts of one question each, whose answer hangs on several documents."""
    drawn = make_prompts(np.random.default_rng(7), 3 * PROMPTS, DOCUMENTS, questions=1)
    chosen = np.flatnonzero(drawn.kinds[:, 0] == Kind.CROSS)[:PROMPTS]
    assert len(chosen) == PROMPTS
    return Prompts(*(each[chosen] for each in drawn))


def teach(engine: Engine, drawn: Prompts) -> None:
    """Each document alone, and what fills its last block."""
    for document in range(DOCUMENTS):
        start = 1 + document * DOCUMENT_TOKENS
        asks = []
        for number, prompt in enumerate(drawn.tokens.tolist()):
            tokens = [BOS, *prompt[start : start + DOCUMENT_TOKENS], *[FILLER] * BLOCK_TOKENS]
            asks.append(Ask(f"teach-{number}-{document}", tuple(tokens), 1))
        engine.run(asks)
    engine.reset_prefix_cache()


class Blended(NamedTuple):
    accuracy: float
    reused: float  # tokens, of all prompts
    spared: float  # tokens of prefill


def blended(engine: Engine, drawn: Prompts, ratio: float) -> Blended:
    before = blended_tokens(engine)
    right = accuracy(engine, drawn, {"ratio": ratio}, f"blended-{ratio}")
    after = blended_tokens(engine)
    reused, spared = (after[kind] - before[kind] for kind in ("reused", "spared"))
    return Blended(right, reused, spared)


def blended_tokens(engine: Engine) -> dict[str, float]:
    """By kind, so far; none before the first."""
    families = text_string_to_metric_families(engine.exposition())
    samples = [each for family in families for each in family.samples]
    counted = [each for each in samples if each.name == "kvstrata_blend_tokens_total"]
    return {"reused": 0.0, "spared": 0.0, **{each.labels["kind"]: each.value for each in counted}}


def accuracy(engine: Engine, drawn: Prompts, blend: object, name: str) -> float:
    asks = [
        Ask(f"{name}-{i}", tuple(prompt), 1, transfer={"blend": blend})
        for i, prompt in enumerate(drawn.tokens.tolist())
    ]
    answers = engine.run(asks)
    if blend:
        whole = (drawn.tokens.shape[1] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert {answers[ask.id].cached_tokens for ask in asks} == {whole}
    said = [answers[ask.id].tokens[0] for ask in asks]
    return float(np.mean(np.array(said) == drawn.targets[:, -1]))


@pytest.mark.parametrize("engine", [(0,), (0, 1, 2)], ids=["0", "as a deeper model"], indirect=True)
def test_with_no_first_tokens_the_ratio_is_all_that_is_computed(engine: Engine) -> None:
    drawn = questions()
    teach(engine, drawn)
    nothing, balanced = (blended(engine, drawn, ratio) for ratio in (0.0, 0.15))
    print(f"recompute_ratio 0.15, no first tokens: {balanced.accuracy:.4f}")  # noqa: T201 - for -rP
    assert nothing.spared == nothing.reused > 0
    assert balanced.accuracy >= 0.97


@pytest.mark.parametrize("engine", [(4,)], ids=["4"], indirect=True)
def test_one_question_across_documents_is_answered_as_after_a_whole_prefill(engine: Engine) -> None:
    drawn = questions()
    teach(engine, drawn)
    nothing, few, balanced = (blended(engine, drawn, ratio) for ratio in (0.0, 0.02, 0.15))
    full = accuracy(engine, drawn, False, "full")  # what it computes others find from now on
    # Where nothing is chosen, what is reused and not spared are the first four tokens of each run.
    first = 1 - nothing.spared / nothing.reused
    print(  # noqa: T201 - for -rP
        f"recompute_ratio 0: {nothing.accuracy:.4f}, {first:.1%} of the reused tokens recomputed\n"
        f"recompute_ratio 0.02: {few.accuracy:.4f}, {first + 0.02:.1%} at most\n"
        f"recompute_ratio 0.15: {balanced.accuracy:.4f}, {first + 0.15:.1%} at most\n"
        f"whole prefill: {full:.4f}"
    )
    assert full >= 0.98
    assert balanced.accuracy >= 0.97
    assert first + 0.02 <= 0.15
    assert few.accuracy >= 0.92
    assert 0.12 <= first <= 0.13
    assert nothing.accuracy <= 0.3
