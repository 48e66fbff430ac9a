"""What the CPU that the tests run on can do."""

from typing import Final

import torch

FP8_RUNS_HERE: Final[bool] = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
"""Whether vLLM takes an fp8 KV cache (``cpu_attn._get_attn_isa``)."""
