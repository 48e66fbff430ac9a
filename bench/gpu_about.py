"""On what a run of `make gpu` was made: the GPU, what drives it, and what KVStrata says of it."""

import ctypes
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from kvstrata.transfer.cuda_dma import driver_library
from kvstrata.transfer.driver import DeviceFault

__all__ = ["about", "driver_version", "told"]

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_PACKAGES: Final = ("cuda-bindings", "triton", "vllm")
_LOGGERS: Final = ("kvstrata", "bench")


def about(device: torch.device) -> dict[str, Any]:
    """Facts by name; None for what is not there."""
    gpu = torch.cuda.get_device_properties(device)
    return {
        "gpu": gpu.name,
        "memory_bytes": gpu.total_memory,
        "multiprocessors": gpu.multi_processor_count,
        "capability": f"{gpu.major}.{gpu.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver_api": driver_version(is_rocm=torch.version.hip is not None),
        "driver": _first_line(_DRIVER),
        **{package: _version(package) for package in _PACKAGES},
    }


def driver_version(*, is_rocm: bool) -> int | None:
    """Of CUDA or ROCm, as the driver tells it: 12080 is CUDA 12.8."""
    found = ctypes.c_int()
    try:
        library = driver_library(is_rocm=is_rocm)
    except DeviceFault:
        return None
    ask = library.hipDriverGetVersion if is_rocm else library.cuDriverGetVersion
    return None if ask(ctypes.byref(found)) else found.value


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().partition("\n")[0]
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class _Told(logging.Handler):
    """Adds each message to *lines*, and prints it."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        self._lines.append(line)
        print(line, file=sys.stderr)


@contextmanager
def told(lines: list[str]) -> Iterator[None]:
    """Meanwhile *lines* gets what is logged: which way of copying was chosen, and what was pinned."""
    handler = _Told(lines)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
