"""A fingerprint of model weights that reads little of them.

Enough bytes of every tensor are hashed that another fine-tune, quantization or checkpoint step is
told apart; a copy of the folder elsewhere gives the same fingerprint.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from blake3 import blake3
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from vllm.config import LoadConfig, ModelConfig

__all__ = ["model_folder", "model_name", "weights_fingerprint"]

_SAFETENSORS: Final = ".safetensors"
_WEIGHT_SUFFIXES: Final = frozenset({_SAFETENSORS, ".bin", ".pt", ".pth", ".gguf"})
_TENSOR_SAMPLE_BYTES: Final = 4 << 10
_FILE_SAMPLE_BYTES: Final = 64 << 10
_FILE_SAMPLES: Final = 16
_LENGTH_BYTES: Final = 8  # of the header, first in a safetensors file
# Loaders that take the weights from the files of the model's folder.
_FOLDER_FORMATS: Final = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)


def weights_fingerprint(model: ModelConfig, load: LoadConfig) -> str | None:
    """What the weights are, or None if they cannot be found without the network."""
    if load.load_format == "dummy":
        return f"dummy:seed={model.seed}"
    if load.load_format not in _FOLDER_FORMATS:
        return None
    source = Path(model.model_weights or model.model)
    if not source.exists():
        snapshot = _cached_snapshot(model, load)
        if snapshot is None:
            return None
        source = snapshot
    files = [source] if source.is_file() else _weight_files(source)
    if not files:
        return None
    digest = blake3()
    for file in files:
        digest.update(file.name.encode() + b"\0")
        for piece in _samples(file):
            digest.update(piece)
    return f"files:{len(files)}:{digest.hexdigest()[:32]}"


def model_folder(model: ModelConfig, load: LoadConfig) -> Path | None:
    """Where its configuration lies, or None if that cannot be found without the network."""
    folder = Path(model.model)
    return folder if folder.is_dir() else _cached_snapshot(model, load)


def model_name(model: ModelConfig) -> str:
    """The hub id, or the last part of a local path: a folder may be moved."""
    return Path(model.model).name if Path(model.model).exists() else model.model


def _cached_snapshot(model: ModelConfig, load: LoadConfig) -> Path | None:
    """The snapshot of a hub id in the local cache; asks nobody."""
    try:
        found = try_to_load_from_cache(
            model.model, "config.json", cache_dir=load.download_dir, revision=model.revision
        )
    except HFValidationError:  # an URL or a path, not a hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def _weight_files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.suffix in _WEIGHT_SUFFIXES and f.is_file())


def _samples(file: Path) -> Iterator[bytes]:
    with file.open("rb") as f:
        fd = f.fileno()
        total_bytes = os.fstat(fd).st_size
        yield total_bytes.to_bytes(8, "little")
        header = _header(fd, total_bytes) if file.suffix == _SAFETENSORS else None
        if header is None:
            step = max(_FILE_SAMPLE_BYTES, total_bytes // _FILE_SAMPLES)
            for offset in range(0, total_bytes, step):
                yield os.pread(fd, _FILE_SAMPLE_BYTES, offset)
            return
        yield header
        for start, end in _tensor_spans(header):
            for offset in (start, start + (end - start) // 2):
                yield os.pread(fd, min(_TENSOR_SAMPLE_BYTES, end - offset), offset)


def _header(fd: int, total_bytes: int) -> bytes | None:
    """The JSON header of a safetensors file; None if this is not one."""
    length = int.from_bytes(os.pread(fd, _LENGTH_BYTES, 0), "little")
    if not 2 <= length <= total_bytes - _LENGTH_BYTES:
        return None
    header = os.pread(fd, length, _LENGTH_BYTES)
    return header if header.startswith(b"{") else None


def _tensor_spans(header: bytes) -> list[tuple[int, int]]:
    """Byte range in the file of every tensor, in file order."""
    data = _LENGTH_BYTES + len(header)
    tensors = json.loads(header)
    tensors.pop("__metadata__", None)
    return sorted(
        (data + start, data + end) for start, end in (t["data_offsets"] for t in tensors.values())
    )
