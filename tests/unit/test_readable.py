"""Which pages a GPU's kernels are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

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


def of_arch(monkeypatch: pytest.MonkeyPatch, arch: int | str) -> None:
    target = SimpleNamespace(arch=arch)
    active = SimpleNamespace(get_current_target=lambda: target)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))


@pytest.mark.parametrize(("arch", "named"), [(75, "7.5"), (80, "8.0"), (86, "8.6")])
def test_e4m3_is_refused_where_nothing_converts_it(
    monkeypatch: pytest.MonkeyPatch, arch: int, named: str
) -> None:
    of_arch(monkeypatch, arch)
    with pytest.raises(ConfigError, match=rf"compute capability {named}\n.*8\.9 or later"):
        check_readable(pages(E4M3))
    for each in (pages(E5M2), pages(torch.bfloat16), pages(E4M3, "cpu")):
        check_readable(each)


@pytest.mark.parametrize("arch", [89, 90, 100, "gfx942"])
def test_later_gpus_and_other_makers_read_it(
    monkeypatch: pytest.MonkeyPatch, arch: int | str
) -> None:
    of_arch(monkeypatch, arch)
    check_readable(pages(E4M3))


def test_both_kernels_ask_before_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    of_arch(monkeypatch, 80)
    cache = pages(E4M3)
    numbers = torch.arange(2)
    moves = move_triton.Moves(numbers, numbers, numbers, numbers)
    rope = move_triton.Rope(torch.zeros(4, 8), is_neox=True)
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        move_triton.move_tokens(cache, cache, moves, rope)
    queries = torch.zeros(2, 2, 8)
    with pytest.raises(ConfigError, match="float8_e4m3fn"):
        attend_triton.attend(queries, numbers, PagedKV(cache, numbers, 8), 1.0)
