"""When the kernel that copies is compiled: once for each width of a word, and for no other reason."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import create_function_from_signature

from kvstrata.transfer import cuda_triton


def test_no_number_of_pieces_makes_it_compile_anew() -> None:
    """Triton compiles for what it takes an argument to be: one, a multiple of 16, or any number."""
    kernel = cuda_triton._copy
    bind = create_function_from_signature(kernel.signature, kernel.params, BaseBackend)
    taken_for = set()
    for jobs, rows in product((1, 2, 3, 16, 4096), (1, 9, 16)):
        columns = torch.zeros(3, jobs, dtype=torch.int64)
        _, found, _ = bind(*columns, jobs, rows, WORD=tl.int64, BYTES=8, ROWS=32, ROW_WORDS=256)
        taken_for.add(str(found))
    assert len(taken_for) == 1


def test_its_list_is_in_pinned_memory_which_torch_keeps_until_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From other memory the driver may copy when the stream has come so far, and wait for that."""
    pinned, uploads, launched = [], [], []
    empty, gpu = torch.empty, torch.device("cuda", 0)

    def fake_empty(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = empty(*shape, **options)
        if pin_memory:
            pinned.append(made.data_ptr())
        return made

    def to(self: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        uploads.append((self.data_ptr(), device, non_blocking))
        return self.clone()

    class Launches:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *columns, **_: launched.append([grid, *columns])

    monkeypatch.setattr(torch, "empty", fake_empty)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(cuda_triton, "_copy", Launches())
    targets, sources, lengths = np.array([[80, 8, 16], [24, 800, 8], [8, 8, 64]])
    cuda_triton.copy_by_kernel(targets, sources, lengths, gpu)
    assert uploads == [(pinned[0], gpu, True)]
    ((grid, *columns, pieces, rows_each),) = launched
    assert (grid, pieces, rows_each) == ((1,), 3, 1)
    assert [c.tolist() for c in columns] == [[24, 800, 8], [80, 8, 16], [8, 8, 64]]
