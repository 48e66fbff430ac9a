"""What watches the kernels of blending notices an access beside what they were given."""

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.bounds import OutOfBounds, kept_to_what_is_given
from triton.runtime.interpreter import InterpreterError


@triton.jit
def _copy(source, to, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton compiles it
    at = tl.arange(0, SIZE)
    tl.store(to + at, tl.load(source + at, at < count, 0), at < count)


def test_what_is_masked_may_be_outside() -> None:
    source, to = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    with kept_to_what_is_given() as seen:
        _copy[(1,)](source, to, 5, SIZE=8)
    assert torch.equal(source, to)
    assert seen == [10]


@pytest.mark.parametrize("sizes", [(5, 8), (8, 5)], ids=["read", "written"])
def test_one_element_beside_a_tensor_is_noticed(sizes: tuple[int, int]) -> None:
    source, to = (torch.zeros(size, dtype=torch.int64) for size in sizes)
    with kept_to_what_is_given(), pytest.raises(InterpreterError) as raised:
        _copy[(1,)](source, to, 6, SIZE=8)
    assert isinstance(raised.value.__cause__, OutOfBounds)
