"""Which pages a GPU's kernels are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstrata.blend import attend_triton, move_triton
from kvstrata.blend.attend_triton import PagedKV
from kvstrata.blend.readable import check_readable
from kvstrata.core.errors import ConfigError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def pages(dtype: torch.dtype, kind: str = "cuda") -> Any:
    """Of which only the kind of element is real."""
    real = torch.zeros(2, 2, 4, 16)
    return SimpleNamespace(
        dtype=dtype, device=torch.device(kind), ndim=4, shape=real.shape, stride=real.stride
    )


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
def test_e4m3_is_refused_where_nothing_converts_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    own = f"{capability[0]}.{capability[1]}"
    with pytest.raises(ConfigError, match=rf"compute capability {own}\n.*8\.9 or later"):
        check_readable(pages(E4M3))
    for each in (pages(E5M2), pages(torch.bfloat16), pages(E4M3, "cpu")):
        check_readable(each)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    check_readable(pages(E4M3))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_later_gpus_read_it(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    check_readable(pages(E4M3))


def test_both_kernels_ask_before_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    cache = pages(E4M3)
    numbers = torch.arange(2)
    moves = move_triton.Moves(numbers, numbers, numbers, numbers)
    rope = move_triton.Rope(torch.zeros(4, 8), is_neox=True)
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        move_triton.move_tokens(cache, cache, moves, rope)
    queries = torch.zeros(2, 2, 8)
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        attend_triton.attend(queries, numbers, PagedKV(cache, numbers, 8), 1.0)
