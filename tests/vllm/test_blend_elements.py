"""KV of 8 bits, read and written again by the writer of vLLM's CPU backend."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops

from kvstrata.blend.position import PositionCorrector
from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.blend.elements import Elements, elements_of

TYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
HEAD_SIZE = 32
BLOCK_TOKENS = 32
SCALES = (1.0, 0.37, 0.013, 3.3)

in_all_types = pytest.mark.parametrize("name", TYPES)
of_all_models = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def elements(name: str, dtype: torch.dtype) -> Elements:
    cache = torch.empty(0, dtype=torch.uint8)
    return elements_of(SimpleNamespace(kv_cache_dtype=name, dtype=dtype, kv_cache=cache))


def kept(numbers: torch.Tensor, name: str, scale: float) -> torch.Tensor:
    """What vLLM's writer makes of some values: bytes."""
    tokens = -(-len(numbers) // HEAD_SIZE // BLOCK_TOKENS) * BLOCK_TOKENS
    values = torch.zeros(tokens * HEAD_SIZE, dtype=numbers.dtype)
    values[: len(numbers)] = numbers
    values = values.view(tokens, 1, HEAD_SIZE)
    cache = torch.full((1, 1, 2 * tokens, HEAD_SIZE), 0x55, dtype=torch.uint8)
    key_cache, value_cache = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        torch.zeros_like(values),
        values,
        key_cache,
        value_cache,
        torch.arange(tokens),
        "vec",
        k_scale=scale,
        v_scale=scale,
        kv_cache_dtype=name,
    )
    return value_cache.reshape(-1)[: len(numbers)].view(torch.int8)


@of_all_models
@in_all_types
def test_what_is_read_and_written_again_is_what_it_was(name: str, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    every = every[every.view(TYPES[name]).float().isfinite()].view(torch.int8)
    ours = elements(name, dtype)
    for scale in SCALES:
        numbers = ours.read(every, scale)
        assert torch.equal(numbers, every.view(TYPES[name]).float() * scale)
        again = kept(ours.to_write(numbers, scale), name, scale)
        assert torch.equal(ours.read(again, scale), numbers), scale


@of_all_models
@in_all_types
def test_other_numbers_become_the_nearest_that_can_be_kept(name: str, dtype: torch.dtype) -> None:
    ours = elements(name, dtype)
    drawn = torch.randn(4000, generator=torch.Generator().manual_seed(1))
    drawn = drawn * 10 ** torch.linspace(-4, 3, len(drawn))
    most = torch.finfo(TYPES[name]).max
    for scale in SCALES:
        expected = drawn.clamp(-most, most).to(TYPES[name]).float() * scale
        found = kept(ours.to_write(drawn * scale, scale), name, scale)
        close = torch.isclose(ours.read(found, scale), expected, rtol=0, atol=0)
        assert close.float().mean() > 0.999, scale  # but for what lies in the middle of two


@in_all_types
def test_a_key_that_is_moved_is_off_by_half_a_step_of_what_is_kept(name: str) -> None:
    """Beside the key that is kept where it was, turned without any rounding."""
    tokens, dim, scale = 256, 64, 0.37
    drawn = torch.Generator().manual_seed(2)
    ours = elements(name, torch.bfloat16)
    model = torch.randn(tokens * dim, generator=drawn).to(torch.bfloat16)
    keys = ours.read(kept(model, name, scale), scale).view(tokens, 1, dim)
    angles = torch.outer(torch.arange(2000), 10_000 ** -(torch.arange(0, dim, 2) / dim))
    table = torch.cat([angles.cos(), angles.sin()], 1).float()
    sources = np.arange(tokens)
    corrector = PositionCorrector(table, rotary_dim=dim, is_neox=True)
    moved = corrector.correct(keys, sources, sources + 700).flatten()
    found = ours.read(kept(ours.to_write(moved, scale), name, scale), scale)
    left, right = keys.double().squeeze(1).chunk(2, 1)
    cos, sin = (angles[700].double().cos(), angles[700].double().sin())
    right_one = torch.cat([left * cos - right * sin, right * cos + left * sin], 1).flatten()
    numbers = torch.finfo(TYPES[name])
    least = numbers.smallest_normal * numbers.eps * scale  # the step of the smallest numbers
    bound = right_one.abs() * numbers.eps / 2 + least / 2
    off = (found - right_one).abs()
    assert (off <= bound * (1 + 1e-4) + 1e-6).all()
    assert (off > bound / 2).any()


def test_numbers_that_are_kept_in_another_way_are_refused() -> None:
    layer: Any = SimpleNamespace(
        kv_cache_dtype="fp8_per_token_head",
        layer_name="model.layers.3",
        kv_cache=torch.empty(0, dtype=torch.uint8),
    )
    with pytest.raises(ConfigError, match=r"layer model\.layers\.3 is quantised \(fp8_per_token"):
        elements_of(layer)
