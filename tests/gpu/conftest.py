"""Tests that need a GPU, and fail without one: `make gpu` runs them, and nothing else does."""

from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pieces that the kernel has copied, by call; those of the choice at start are the first."""
    from kvstrata.transfer import cuda_triton

    calls: list[int] = []
    kernel = cuda_triton.copy_by_kernel

    def counted(targets: Any, sources: Any, lengths: Any, device: Any) -> None:
        calls.append(len(lengths))
        kernel(targets, sources, lengths, device)

    monkeypatch.setattr(cuda_triton, "copy_by_kernel", counted)
    return calls
