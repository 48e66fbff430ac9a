import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvstrata.blend.position import (
    GATE_LIMIT,
    PositionCorrector,
    check_rope_settings,
    gate_shifts,
    mean_difference,
    relative_difference,
)
from kvstrata.core.errors import ConfigError, InvariantViolated

POSITIONS = 4096
HEADS = 3
THETA = 10_000.0
FACTOR = 1.37  # what YaRN multiplies a table with
KINDS = [
    pytest.param(True, 64, 0, 64, id="neox"),
    pytest.param(False, 64, 0, 64, id="gptj"),
    pytest.param(True, 32, 0, 64, id="neox-half"),
    pytest.param(False, 16, 0, 64, id="gptj-quarter"),
    pytest.param(False, 64, 128, 192, id="mla"),
]
Integers = NDArray[np.int64]


def angles(positions: Integers, rotary_dim: int, theta: float = THETA) -> NDArray[np.float64]:
    frequencies = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    return np.outer(positions, frequencies).astype(np.float64)


def table_of(rotary_dim: int, factor: float = 1.0, theta: float = THETA) -> torch.Tensor:
    all_angles = torch.from_numpy(angles(np.arange(POSITIONS), rotary_dim, theta))
    return (factor * torch.cat([all_angles.cos(), all_angles.sin()], -1)).float()


def pairs(rotary_dim: int, is_neox: bool, first_dim: int) -> tuple[Integers, Integers]:
    """Elements of a head that make the real and the imaginary parts."""
    first = np.arange(rotary_dim // 2)
    if is_neox:
        return first_dim + first, first_dim + first + rotary_dim // 2
    return first_dim + 2 * first, first_dim + 2 * first + 1


def turned(
    keys: NDArray[np.float64], by: NDArray[np.complex128], real: Integers, imaginary: Integers
) -> NDArray[np.float64]:
    """*keys* (n, heads, head_dim) times the complex numbers *by* (n, pairs)."""
    result = keys.copy()
    product = (keys[..., real] + 1j * keys[..., imaginary]) * by[:, None, :]
    result[..., real], result[..., imaginary] = product.real, product.imag
    return result


def random_keys(tokens: int, head_dim: int) -> NDArray[np.float64]:
    return np.random.default_rng(7).standard_normal((tokens, HEADS, head_dim))


def random_moves(tokens: int) -> tuple[Integers, Integers]:
    rng = np.random.default_rng(11)
    return rng.integers(0, POSITIONS, tokens), rng.integers(0, POSITIONS, tokens)


@pytest.mark.parametrize("factor", [1.0, FACTOR])
@pytest.mark.parametrize(("is_neox", "rotary_dim", "first_dim", "head_dim"), KINDS)
def test_a_moved_key_is_that_of_its_target(
    is_neox: bool, rotary_dim: int, first_dim: int, head_dim: int, factor: float
) -> None:
    sources, targets = random_moves(600)
    keys = random_keys(600, head_dim)
    where = pairs(rotary_dim, is_neox, first_dim)

    def at(positions: Integers) -> NDArray[np.float64]:
        return turned(keys, factor * np.exp(1j * angles(positions, rotary_dim)), *where)

    corrector = PositionCorrector(
        table_of(rotary_dim, factor), rotary_dim=rotary_dim, is_neox=is_neox, first_dim=first_dim
    )
    stored = torch.from_numpy(at(sources)).float()
    expected = torch.from_numpy(at(targets))
    moved = corrector.correct(stored, sources, targets)
    assert moved.dtype == torch.float32
    assert relative_difference(moved, expected) <= 1e-6
    assert relative_difference(stored, expected) > GATE_LIMIT


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_the_rounding_of_a_table_drops_out(dtype: torch.dtype, limit: float) -> None:
    sources, targets = random_moves(300)
    keys = random_keys(300, 64)
    coarse = table_of(64, FACTOR).to(dtype)
    exact = coarse.double().numpy()
    applied = exact[:, :32] + 1j * exact[:, 32:]
    where = pairs(64, True, 0)
    stored = torch.from_numpy(turned(keys, applied[sources], *where))
    expected = torch.from_numpy(turned(keys, applied[targets], *where))
    of_true_angles = PositionCorrector(table_of(64, FACTOR), rotary_dim=64, is_neox=True)
    far = of_true_angles.correct(stored.float(), sources, targets)
    assert relative_difference(far, expected) > 3e-4
    corrector = PositionCorrector(coarse, rotary_dim=64, is_neox=True)
    exactly = corrector.correct(stored.float(), sources, targets)
    assert relative_difference(exactly, expected) <= 1e-6
    rounded = corrector.correct(stored.to(dtype), sources, targets)
    assert rounded.dtype == dtype
    assert relative_difference(rounded, expected) <= limit


def test_a_token_that_stays_keeps_its_bytes() -> None:
    corrector = PositionCorrector(table_of(64), rotary_dim=64, is_neox=True)
    keys = torch.from_numpy(random_keys(4, 64)).to(torch.bfloat16)
    keys[1, 0, :4] = torch.tensor([-0.0, math.nan, math.inf, -math.inf])
    positions = np.array([5, 9, 13, 17])
    moved = corrector.correct(keys, positions, np.array([6, 9, 12, 17]))
    stays = [1, 3]
    assert torch.equal(moved[stays].view(torch.int16), keys[stays].view(torch.int16))
    assert (moved[[0, 2]] != keys[[0, 2]]).any(-1).all()
    assert corrector.correct(keys, positions, positions) is keys
    none = np.empty(0, np.int64)
    assert corrector.correct(keys[:0], none, none).shape == (0, HEADS, 64)


def test_stored_keys_stay_as_they_are() -> None:
    corrector = PositionCorrector(table_of(32), rotary_dim=32, is_neox=False)
    keys = torch.from_numpy(random_keys(4, 64)).float()
    before = keys.clone()
    corrector.correct(keys, np.arange(4), np.arange(4) + 100)
    assert torch.equal(keys, before)


def test_a_rotation_serves_every_layer_and_no_token_knows_its_neighbours() -> None:
    sources, targets = random_moves(700)
    targets[::5] = sources[::5]
    corrector = PositionCorrector(table_of(64), rotary_dim=64, is_neox=True)
    rotation = corrector.rotation(sources, targets)
    for keys in torch.from_numpy(random_keys(1400, 64)).float().split(700):
        together = rotation.apply(keys)
        for token in (0, 1, 255, 256, 257, 699):
            one = slice(token, token + 1)
            alone = corrector.correct(keys[one], sources[one], targets[one])
            assert torch.equal(together[one], alone)


def test_strided_keys_are_moved_as_contiguous_ones() -> None:
    """As they lie in a page that holds values beside them."""
    sources, targets = random_moves(40)
    corrector = PositionCorrector(table_of(64), rotary_dim=64, is_neox=True)
    page = torch.from_numpy(random_keys(40, 128)).float()
    keys = page[..., 64:]
    expected = corrector.correct(keys.contiguous(), sources, targets)
    assert torch.equal(corrector.correct(keys, sources, targets), expected)


@pytest.mark.parametrize(
    ("sources", "targets", "named"),
    [
        ([0, 4096], [0, 1], "source position 4096 .* 4096 positions"),
        ([0, 1], [0, 5000], "target position 5000 .* 4096 positions"),
        ([-1, 1], [0, 1], "source position -1 "),
    ],
)
def test_a_position_outside_of_the_table_is_named(
    sources: list[int], targets: list[int], named: str
) -> None:
    corrector = PositionCorrector(table_of(64), rotary_dim=64, is_neox=True)
    assert corrector.positions == POSITIONS
    with pytest.raises(InvariantViolated, match=named):
        corrector.rotation(np.array(sources), np.array(targets))


@pytest.mark.parametrize(
    ("keys", "targets"),
    [
        (torch.zeros(2, HEADS, 32), [1, 2]),
        (torch.zeros(3, HEADS, 64), [1, 2]),
        (torch.zeros(2, 64), [1, 2]),
        (torch.zeros(2, HEADS, 64, dtype=torch.uint8), [1, 2]),
        (torch.zeros(2, HEADS, 64), [1]),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: torch.Tensor, targets: list[int]) -> None:
    corrector = PositionCorrector(table_of(64), rotary_dim=64, is_neox=True)
    with pytest.raises(InvariantViolated):
        corrector.correct(keys, np.array([0, 1]), np.array(targets))


@pytest.mark.parametrize(
    ("table", "rotary_dim"),
    [
        (torch.zeros(8, 64), 32),
        (torch.zeros(8, 3), 3),
        (torch.zeros(64), 64),
        (torch.zeros(8, 64, dtype=torch.complex64), 64),
    ],
)
def test_a_table_of_another_kind_is_refused(table: torch.Tensor, rotary_dim: int) -> None:
    with pytest.raises(ConfigError, match="rope table"):
        PositionCorrector(table, rotary_dim=rotary_dim, is_neox=True)


def test_mean_difference() -> None:
    expected = torch.tensor([2.0, -4.0, 4.0, 0.0])
    assert mean_difference(torch.tensor([2.0, -1.0, 4.0, 0.0]), expected) == 0.5
    assert mean_difference(expected, expected) == 0
    assert mean_difference(expected * float("nan"), expected) == float("inf")
    assert mean_difference(expected, torch.zeros(4)) == float("inf")
    assert mean_difference(torch.zeros(4), torch.zeros(4)) == 0


def test_relative_difference() -> None:
    expected = torch.tensor([1.0, -4.0])
    assert relative_difference(torch.tensor([1.0, -3.0]), expected) == 0.25
    assert relative_difference(expected, expected) == 0
    assert relative_difference(expected * 0, expected * 0) == 0
    assert relative_difference(expected, expected * 0) == math.inf
    for bad in (math.nan, math.inf):
        broken = torch.tensor([1.0, bad])
        assert relative_difference(broken, expected) == math.inf
        assert relative_difference(expected, broken) == math.inf


def test_shifts_of_the_gate_reach_the_end_of_the_table() -> None:
    assert gate_shifts(4096, 96) == (1, 1333, 4000)
    assert gate_shifts(97, 96) == (1,)
    with pytest.raises(InvariantViolated):
        gate_shifts(96, 96)


def test_settings_of_the_rope_must_be_those_of_the_model() -> None:
    own: dict[str, Any] = {"model_rope_theta": 500_000.0, "model_head_dim": 128}
    check_rope_settings(rope_theta=None, head_dim=None, **own)
    check_rope_settings(rope_theta=500_000, head_dim=128, **own)
    with pytest.raises(ConfigError, match=r"rope_theta is set to 10000, .* 500000\n.*remove rope"):
        check_rope_settings(rope_theta=10_000.0, head_dim=None, **own)
    with pytest.raises(ConfigError, match=r"head_dim is set to 64, .* 128\n.*remove head_dim"):
        check_rope_settings(rope_theta=None, head_dim=64, **own)
    with pytest.raises(ConfigError, match="the model has none"):
        check_rope_settings(rope_theta=1e4, head_dim=None, **own | {"model_rope_theta": None})
