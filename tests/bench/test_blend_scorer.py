"""The model of bench/blend, run whole, run in steps, and run by transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from bench.blend.checkpoint import SHIPPED, load_model, save_model
from bench.blend.donors import DONORS, EXACT_TOKENS, Before, Donors, seen_before
from bench.blend.model import Llama, Shape
from bench.blend.scorer import BlendedPrompts, OnePrompt, blend
from bench.blend.task import ANSWERS, QUESTIONS, VOCABULARY, make_prompts
from bench.blend.train import FactoredEmbedding, with_plain_embedding

from kvstrata.blend.rules import BoundaryRule, FullRule, HkvdRule, TwoRoundQueryRule
from kvstrata.blend.selection import Rule, ScoreDeviation, drive

PROMPTS = 5
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> Llama:
    return load_model()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.from_numpy(make_prompts(np.random.default_rng(1), PROMPTS, 6).tokens)


def before_of(model: Llama, tokens: torch.Tensor, donors: Donors = "isolated") -> Before:
    return seen_before(model, tokens, donors, np.random.default_rng(2))


def blended_logits(
    model: Llama, before: Before, rule: Rule, *, corrected: bool = True
) -> torch.Tensor:
    prompts = before.reused(model, corrected=corrected)
    blend(prompts, before.plan, lambda _: rule)
    return prompts.compute(before.plan.asking_from, before.plan.prompt_tokens)


def test_transformers_gives_the_same_logits(model: Llama, tokens: torch.Tensor) -> None:
    from transformers import LlamaForCausalLM

    theirs = LlamaForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    with torch.no_grad():
        expected, found = theirs(tokens).logits, model(tokens)
    assert expected.shape[-1] == VOCABULARY
    torch.testing.assert_close(found, expected[..., :ANSWERS], atol=2e-4, rtol=1e-4)
    assert not expected[..., ANSWERS:].any()
    assert (expected[:, -QUESTIONS:].argmax(-1) < ANSWERS).all()


def test_a_saved_model_is_read_back(tmp_path: Path) -> None:
    shape = Shape(vocabulary=VOCABULARY, answers=ANSWERS, hidden=64, layers=2, intermediate=96)
    embedding = FactoredEmbedding(shape.hidden)
    made = Llama(shape, embedding)
    save_model(with_plain_embedding(made, embedding), tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.shape == shape
    tokens = torch.arange(VOCABULARY).unsqueeze(0)
    torch.testing.assert_close(loaded(tokens), made(tokens))


def test_computing_all_tokens_is_the_whole_model(model: Llama, tokens: torch.Tensor) -> None:
    prompts = BlendedPrompts(model, tokens)
    found = prompts.compute(0, 100), prompts.compute(100, tokens.shape[1])
    torch.testing.assert_close(torch.cat(found, 1), model(tokens), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("donors", DONORS)
def test_recomputing_everything_is_full_recompute(
    model: Llama, tokens: torch.Tensor, donors: Donors
) -> None:
    before = before_of(model, tokens, donors)
    found = blended_logits(model, before, FullRule())
    torch.testing.assert_close(found, before.full_logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("donors", DONORS)
def test_moved_keys_of_the_first_layer_are_exact(
    model: Llama, tokens: torch.Tensor, donors: Donors
) -> None:
    """They depend on their own token alone; the exact prefix is so in every layer."""
    before = before_of(model, tokens, donors)
    prompts, end = before.reused(model, corrected=True), before.plan.asking_from
    exact = before.exact.keys[:, :, :end]
    torch.testing.assert_close(prompts.keys[0, :, :end], exact[0], atol=1e-4, rtol=1e-4)
    assert torch.equal(prompts.keys[:, :, :EXACT_TOKENS], exact[:, :, :EXACT_TOKENS])
    unmoved = before.reused(model, corrected=False).keys[0, :, :end]
    assert (unmoved - exact[0]).abs().max() > 0.1


@pytest.mark.parametrize(
    "rule",
    [
        TwoRoundQueryRule(0.1, scored=(0, 1), layers=2),
        HkvdRule(0.1, layer=1, layers=4),
        BoundaryRule(first_tokens=1, last_tokens=0),
    ],
)
def test_many_prompts_are_blended_as_each_alone(
    model: Llama, tokens: torch.Tensor, rule: Rule
) -> None:
    before = before_of(model, tokens)
    together = before.reused(model, corrected=True)
    recomputed = blend(together, before.plan, lambda _: rule)
    logits = together.compute(before.plan.asking_from, before.plan.prompt_tokens)
    for number, expected in enumerate(recomputed):
        only = before_of(model, tokens[number : number + 1])
        alone = only.reused(model, corrected=True)
        selection = rule.select(only.plan, tokens.shape[1])
        assert drive(selection, OnePrompt(alone)).tolist() == expected.tolist()
        found = alone.compute(only.plan.asking_from, only.plan.prompt_tokens)
        torch.testing.assert_close(found[0], logits[number], atol=2e-4, rtol=1e-4)


def test_deviation_is_what_other_documents_have_made_of_a_token(
    model: Llama, tokens: torch.Tensor
) -> None:
    before = before_of(model, tokens)
    prompts, end = before.reused(model, corrected=True), before.plan.asking_from
    step = ScoreDeviation(np.arange(EXACT_TOKENS, end), 1)
    stored = prompts.keys[1].clone(), prompts.values[1].clone()
    scores = prompts.run([step] * PROMPTS)
    for layer in (0, 1):
        fresh = prompts.keys[layer, :, :end]
        torch.testing.assert_close(fresh, before.exact.keys[layer, :, :end], atol=1e-4, rtol=1e-4)
    differences = prompts.keys[1] - stored[0], prompts.values[1] - stored[1]
    expected = sum(part.flatten(2).square().sum(-1) for part in differences)
    torch.testing.assert_close(torch.from_numpy(np.stack(scores)), expected)
    assert (np.stack(scores)[:, end:] == 0).all()
