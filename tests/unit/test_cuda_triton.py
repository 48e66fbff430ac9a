"""When the kernel that copies is compiled: once for each width of a word, and for no other reason."""

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
    for jobs in (1, 2, 3, 16, 4096):
        columns = torch.zeros(3, jobs, dtype=torch.int64)
        _, found, _ = bind(*columns, jobs, WORD=tl.int64, BYTES=8, STEP=4096)
        taken_for.add(str(found))
    assert len(taken_for) == 1
