"""What `make gpu` measures of the kernels of blending, on few tokens."""

import pytest
import torch
from bench import gpu

pytestmark = pytest.mark.usefixtures("in_bounds")


def test_each_kernel_is_measured_beside_the_plain_thing(device: torch.device) -> None:
    found = [*gpu.rotation(device, tokens=32), *gpu.attention(device, tokens=32)]
    assert [(row.what, row.bound) for row in found] == [
        ("rotation and scatter: share of a copy on the device", 0.8),
        ("attention by position: share of torch's causal attention", 0.6),
    ]
    assert all(row.found > 0 for row in found)
