"""What else decides the KV of an image, a video or a sound.

vLLM's hash of one (``MultiModalHasher``) has its content and the request's ``mm_processor_kwargs``,
and not what the engine is started with, nor the files by which it is prepared.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from blake3 import blake3
from vllm.config import LoadConfig, ModelConfig

from kvstrata.integration.vllm.weights import model_folder

__all__ = ["multimodal_settings"]

# What they say changes no number that the model computes; all others of ``MultiModalConfig`` may.
_NOISE: Final = frozenset(
    {
        "allow_missing_mm_embeddings",
        "enable_mm_embeds",
        "language_model_only",
        "limit_per_prompt",
        "mm_encoder_fp8_scale_save_margin",
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_only",
        "mm_ipc_gpu_memory_gb",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "skip_mm_profiling",
    }
)
_FILES: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def multimodal_settings(model: ModelConfig, load: LoadConfig) -> dict[str, Any]:
    """The settings of the engine, and a digest of each file; empty if *model* takes text alone."""
    config = model.multimodal_config
    if config is None:
        return {}
    settings = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _NOISE}
    folder = model_folder(model, load)
    files = [folder / name for name in _FILES] if folder is not None else []
    if scales := settings.get("mm_encoder_fp8_scale_path"):
        files.append(Path(scales))
    return settings | {f.name: blake3(f.read_bytes()).hexdigest() for f in files if f.is_file()}
