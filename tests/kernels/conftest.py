"""Kernels, on a GPU or interpreted: triton decides which when it is imported.

So they run in a process of their own, with TRITON_INTERPRET=1 where there is no GPU
(tests/unit/test_kernels.py starts it), and an engine in this one is left as it is.
"""

import os

import pytest

if os.environ.get("KERNEL_TESTS") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> object:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
