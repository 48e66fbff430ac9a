"""Tests that need a GPU: `make gpu` runs them."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(needs)
