"""Keys that vLLM's own rotary embeddings turn, moved from one position to another."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.vllm.plans import model_folder, vllm_config
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from kvstrata.blend.position import (
    GATE_LIMIT,
    PositionCorrector,
    gate_shifts,
    relative_difference,
)

TOKENS = 96
HEADS = 4
MAX_POSITION = 8192
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
MOVES = [(37, 37), (0, 3000), (3000, 5), (512, 513), (0, MAX_POSITION - TOKENS), (8000, 0)]


class Kind(NamedTuple):
    head_dim: int
    is_neox: bool
    parameters: dict[str, Any]
    text_rows: int = 0  # how often a model with M-RoPE is told the position of a text token

    def rope(self, dtype: torch.dtype, **changes: Any) -> Any:
        is_neox = changes.pop("is_neox", self.is_neox)
        return get_rope(
            self.head_dim,
            max_position=MAX_POSITION,
            is_neox_style=is_neox,
            rope_parameters=self.parameters | changes,
            dtype=dtype,
        )


PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
}
DEEPSEEK = {
    "rope_type": "deepseek_yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "max_trained_positions": 2048}
SECTIONS = {"mrope_section": [16, 24, 24], "rope_theta": 1_000_000.0}
KINDS = {
    "neox": Kind(128, True, PLAIN),
    "gptj": Kind(128, False, PLAIN),
    "half": Kind(128, True, PLAIN | {"partial_rotary_factor": 0.5}),
    "quarter": Kind(64, False, PLAIN | {"partial_rotary_factor": 0.25}),
    "linear": Kind(128, True, PLAIN | {"rope_type": "linear", "factor": 4.0}),
    "dynamic": Kind(128, True, PLAIN | DYNAMIC),
    "llama3": Kind(128, True, LLAMA3),
    "yarn": Kind(128, True, YARN),
    "deepseek-yarn": Kind(64, False, DEEPSEEK),
    "mrope": Kind(128, True, PLAIN | SECTIONS, text_rows=3),
    "mrope-interleaved": Kind(128, True, PLAIN | SECTIONS | {"mrope_interleaved": True}, 3),
}
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "theta": ("neox", {"rope_theta": 1_000_000.0}),
    "pairs": ("neox", {"is_neox": False}),
    "pairs of a half": ("half", {"is_neox": False}),
    "scaling of linear": ("linear", {"rope_type": "default"}),
    "scaling of dynamic": ("dynamic", {"rope_type": "default"}),
    "scaling of llama3": ("llama3", {"rope_type": "default"}),
    "scaling of yarn": ("yarn", {"rope_type": "default"}),
    "scaling of deepseek": ("deepseek-yarn", {"rope_type": "default"}),
}


@pytest.fixture(scope="module", autouse=True)
def _in_a_configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's layers ask it which of their kernels to use."""
    with set_current_vllm_config(vllm_config(model_folder(tmp_path_factory.mktemp("model")))):
        yield


def keys_at(first: int, kind: Kind, rope: Any, dtype: torch.dtype) -> torch.Tensor:
    """The same keys, as the model's rotary embedding has them from position *first* on."""
    generator = torch.Generator().manual_seed(3)
    raw = torch.randn(TOKENS, HEADS, kind.head_dim, generator=generator).to(dtype)
    positions = torch.arange(first, first + TOKENS)
    if kind.text_rows:
        positions = positions.expand(kind.text_rows, -1).contiguous()
    # DeepSeek's turns heads, all others rows of them.
    flat = raw if kind.parameters is DEEPSEEK else raw.flatten(1)
    _, keys = rope(positions, flat.clone(), flat.clone())
    assert isinstance(keys, torch.Tensor)
    return keys.view(raw.shape)


def corrector_of(rope: Any) -> PositionCorrector:
    return PositionCorrector(
        rope.cos_sin_cache, rotary_dim=rope.rotary_dim, is_neox=rope.is_neox_style
    )


def span(first: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(first, first + TOKENS)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_moved_keys_are_those_of_their_target(name: str, dtype: torch.dtype) -> None:
    kind = KINDS[name]
    rope = kind.rope(dtype)
    corrector = corrector_of(rope)
    assert corrector.positions >= MAX_POSITION
    for source, target in MOVES:
        stored = keys_at(source, kind, rope, dtype)
        moved = corrector.correct(stored, span(source), span(target))
        expected = keys_at(target, kind, rope, dtype)
        assert relative_difference(moved, expected) <= LIMITS[dtype], (source, target)
        if source == target:
            assert moved is stored


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("mistake", WRONG)
def test_the_gate_sees_a_rope_that_is_not_the_models(mistake: str, dtype: torch.dtype) -> None:
    name, changes = WRONG[mistake]
    kind = KINDS[name]
    rope = kind.rope(dtype)
    right, wrong = corrector_of(rope), corrector_of(kind.rope(dtype, **changes))
    shifts = gate_shifts(MAX_POSITION, TOKENS)
    stored = keys_at(0, kind, rope, dtype)

    def worst(corrector: PositionCorrector) -> float:
        return max(
            relative_difference(
                corrector.correct(stored, span(0), span(shift)), keys_at(shift, kind, rope, dtype)
            )
            for shift in shifts
        )

    assert worst(right) <= LIMITS[dtype]
    assert worst(wrong) > GATE_LIMIT
