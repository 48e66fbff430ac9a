"""Jobs as a worker makes them, on a GPU whose engine is at work; see tests/device_jobs.py."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.device_jobs import JOBS, Engine

from kvstrata.transfer.devices import PagedDevice, open_device


class Gpu:
    device = torch.device("cuda", 0)
    scale = 1024  # pages of half a MiB: several chunks

    def __init__(self, kernel_calls: list[int], *, by_kernel: bool, blocks_outermost: bool) -> None:
        self.blocks_outermost = blocks_outermost
        self._kernel_calls = kernel_calls
        self._by_kernel = by_kernel

    def open(self, pages: Sequence[Sequence[torch.Tensor]]) -> PagedDevice:
        opened: Any = open_device(pages)
        for queue in (opened._loads, opened._saves):
            queue._stream.kernel_bytes = 1 << 62 if self._by_kernel else 0
        self._kernel_calls.clear()  # of the choice at start
        device: PagedDevice = opened
        return device

    def launch(self, work: Callable[[], object]) -> None:
        work()

    def delay(self) -> None:
        torch.cuda._sleep(50_000_000)  # tens of milliseconds

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("blocks_outermost", [False, True])
@pytest.mark.parametrize("do", JOBS)
def test_jobs(
    do: Callable[[Engine], None],
    by_kernel: bool,
    blocks_outermost: bool,
    kernel_calls: list[int],
) -> None:
    do(Gpu(kernel_calls, by_kernel=by_kernel, blocks_outermost=blocks_outermost))
    if torch.version.hip is None:
        assert (kernel_calls != []) == by_kernel
