"""Which way of copying is chosen, from rates alone."""

import pytest

from kvstrata.transfer.selection import Measured, choose


def both(is_load: bool, piece: int, kernel: float, engine: float) -> list[Measured]:
    return [Measured(True, is_load, piece, kernel), Measured(False, is_load, piece, engine)]


def test_a_kernel_copies_nothing_that_could_wait() -> None:
    measured = both(True, 8192, 24.0, 12.0) + both(False, 8192, 12.0, 24.0)
    assert choose(measured) == 8192
    assert choose([m._replace(is_load=not m.is_load) for m in measured]) == 0


@pytest.mark.parametrize(("kernel", "limit"), [(10.0, 0), (12.9, 0), (13.1, 8192)])
def test_a_kernel_has_to_be_clearly_faster(kernel: float, limit: int) -> None:
    assert choose(both(True, 8192, kernel, 10.0)) == limit


def test_a_kernel_is_used_up_to_the_first_size_at_which_it_is_not_worth_it() -> None:
    measured = both(True, 4096, 20.0, 10.0) + both(True, 65536, 9.0, 10.0)
    measured += both(True, 16384, 20.0, 15.0) + both(True, 1 << 21, 90.0, 10.0)
    assert choose(measured) == 16384


def test_what_was_not_compared_is_left_to_the_copy_engine() -> None:
    assert choose([]) == 0
    assert choose([Measured(True, True, 4096, 9.0)]) == 0
    assert choose([Measured(False, True, 4096, 9.0)]) == 0
