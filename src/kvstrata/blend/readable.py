"""Which elements a GPU's own instructions convert, and so the kernels that triton makes for it."""

from typing import Final

import torch

from kvstrata.core.errors import ConfigError

__all__ = ["check_readable"]

_LEAST_OF_E4M3: Final = 8, 9  # compute capability: Ada, Hopper and later


def check_readable(pages: torch.Tensor) -> None:
    """Raises ``ConfigError`` if no kernel can read *pages* on the GPU that they are on."""
    if pages.dtype != torch.float8_e4m3fn or pages.device.type != "cuda" or torch.version.hip:
        return
    found = torch.cuda.get_device_capability(pages.device)
    if found < _LEAST_OF_E4M3:
        raise ConfigError(
            f"no kernel reads float8_e4m3fn on a GPU of compute capability {found[0]}.{found[1]}",
            hint="use a KV cache of fp8_e5m2 or of 16 bits, or a GPU of 8.9 or later",
        )
