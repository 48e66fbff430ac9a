"""Kernels, on a GPU or interpreted: triton decides which when it is imported.

So they run in a process of their own, with TRITON_INTERPRET=1 where there is no GPU
(tests/unit/test_kernels.py starts it), and an engine in this one is left as it is.
"""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec

import pytest

collect_ignore = []
if find_spec("vllm") is None:  # on a machine with a GPU it need not be there
    collect_ignore.append("test_strided_pages.py")
if os.environ.get("TRITON_INTERPRET") != "1":  # what it is about is in the interpreter
    collect_ignore.append("test_bounds.py")
if os.environ.get("KERNEL_TESTS") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> object:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def in_bounds() -> Iterator[None]:
    """Interpreted kernels of blending touch nothing but the tensors that they are given.

    Those of transfers are given addresses, of which the interpreter knows no end.
    """
    from tests.kernels.bounds import kept_to_what_is_given
    from triton import knobs

    with kept_to_what_is_given() if knobs.runtime.interpret else nullcontext():
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``fp8``: each type of eight bits; what this GPU cannot convert is left out, with a word."""
    if "fp8" not in metafunc.fixturenames:
        return
    import torch

    has_cuda = torch.cuda.is_available() and torch.version.hip is None
    lacks = has_cuda and torch.cuda.get_device_capability() < (8, 9)
    left_out = pytest.mark.skipif(lacks, reason="GPUs below 8.9 do not convert float8_e4m3fn")
    each = [pytest.param(torch.float8_e4m3fn, marks=left_out, id="e4m3"), torch.float8_e5m2]
    metafunc.parametrize("fp8", each, ids=str)
