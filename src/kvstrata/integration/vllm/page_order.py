"""Which order of its KV cache to ask vLLM for."""

from vllm.config import VllmConfig
from vllm.platforms import current_platform

__all__ = ["wanted_page_order"]

_HEADS_FIRST_CAPABILITY = 10  # there FlashInfer's kernels want heads before tokens in a page


def wanted_page_order(vllm_config: VllmConfig) -> str | None:
    """Blocks outermost, so that a block is one piece to copy; None leaves it to vLLM.

    vLLM takes it where all of the model's attention backends can, else says so and takes its own.
    ``VLLM_KV_CACHE_LAYOUT`` is stronger. A CPU has one order only, and versions before 0.32 know
    others by name.
    """
    if current_platform.is_cpu() or not hasattr(vllm_config.cache_config, "kv_cache_layout"):
        return None
    capability = current_platform.get_device_capability()
    heads_first = capability is not None and capability.major == _HEADS_FIRST_CAPABILITY
    return "BLHNC" if heads_first else "BLNHC"
