"""Which elements a GPU's own instructions convert, and so the kernels that triton makes for it."""

from typing import Final

import torch
import triton

from kvstrata.core.errors import ConfigError

__all__ = ["check_readable"]

_LEAST_OF_E4M3: Final = 89  # compute capability 8.9 of NVIDIA: Ada, Hopper and later


def check_readable(pages: torch.Tensor) -> None:
    """Raises ``ConfigError`` if no kernel can read *pages* on the GPU that they are on.

    Of other makers' GPUs triton knows no number, and they convert by other means.
    """
    if pages.dtype != torch.float8_e4m3fn or pages.device.type == "cpu":
        return
    found = triton.runtime.driver.active.get_current_target().arch
    if isinstance(found, int) and found < _LEAST_OF_E4M3:
        raise ConfigError(
            "no kernel reads float8_e4m3fn on a GPU of compute capability "
            f"{found // 10}.{found % 10}",
            hint="use a KV cache of fp8_e5m2 or of 16 bits, or a GPU of 8.9 or later",
        )
