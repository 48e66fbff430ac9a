"""The kernels, compiled for GPUs that are not here: as their launches would, to the machine's code."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvstrata.blend import attend_triton, move_triton
from kvstrata.blend.attend_triton import PagedKV, attend
from kvstrata.blend.move_triton import Moves, Rope, move_tokens
from kvstrata.transfer import cuda_triton
from kvstrata.transfer.cuda_triton import copy_by_kernel

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # of a program, at most
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

pytestmark = pytest.mark.filterwarnings("error")  # what a GPU's own tests may be told is an error


class Compiler:
    """In the place of a GPU's driver; what would be launched is compiled, and kept."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.made: list[Any] = []

    @property
    def utils(self) -> "Compiler":
        return self

    def get_device_properties(self, device: int | None) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[self.arch]}

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def launch(self, kernel: Any, *arguments: Any, **options: Any) -> None:
        self.made.append(kernel.run(*arguments, grid=(1,), warmup=True, **options))


@pytest.fixture
def compiled_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[int, Callable[[], object]], Any]:
    """What one launch is compiled to for an architecture."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in (cuda_triton._copy, move_triton._move, attend_triton._attend):
        monkeypatch.setattr(
            kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder)
        )

    def compile_for(arch: int, launch: Callable[[], object]) -> Any:
        compiler = Compiler(arch)
        monkeypatch.setattr(driver, "_active", compiler)
        monkeypatch.setattr(JITFunction, "__getitem__", lambda k, _: partial(compiler.launch, k))
        attend_triton._shared_bytes.cache_clear()
        launch()
        (made,) = compiler.made
        assert len(made.asm["cubin"]) > 1000
        assert re.search(rf"\.target sm_{arch}", made.asm["ptx"])
        assert made.metadata.shared <= SHARED_BYTES[arch]
        return made

    return compile_for


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("word", "store"), [(8, "b64"), (4, "b32"), (2, "b16"), (1, "b8")])
def test_the_copy_has_words_of_each_width(
    compiled_for: Any, arch: int, word: int, store: str
) -> None:
    column = np.array([word, 3 * word])
    made = compiled_for(arch, lambda: copy_by_kernel(column, column, column, torch.device("cpu")))
    assert re.search(rf"st\.global(\.v\d)?\.{store}", made.asm["ptx"])


def move(dtype: torch.dtype, *, is_neox: bool) -> None:
    pages = torch.zeros(4, 8, 16, 256).to(dtype)
    number = torch.arange(16)
    rope = Rope(torch.zeros(64, 128), is_neox)
    move_tokens(pages, torch.zeros_like(pages), Moves(number, number, number, number), rope)


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        *((arch, dtype) for arch in (80, 90) for dtype in (BF16, FP16, FP32, E5M2)),
        (89, E4M3),
        (90, E4M3),
    ],
)
def test_tokens_are_moved(compiled_for: Any, arch: int, dtype: torch.dtype, is_neox: bool) -> None:
    compiled_for(arch, lambda: move(dtype, is_neox=is_neox))


def attention(dtype: torch.dtype, stored: torch.dtype) -> None:
    size = 64 if dtype == FP32 else 128  # float32 takes long to compile
    pages = torch.zeros(8, 8, 16, 2 * size).to(stored)
    queries = torch.zeros(100, 32, size, dtype=dtype)
    attend(queries, torch.arange(100), PagedKV(pages, torch.arange(8), size), 0.1)


@pytest.mark.parametrize(
    ("arch", "dtype", "stored"),
    [
        (80, BF16, BF16),
        (80, FP16, FP16),
        (80, FP32, FP32),
        (80, BF16, E5M2),
        (89, BF16, E4M3),
        (90, BF16, BF16),
        (90, FP16, E5M2),
        (90, FP32, FP32),
        (90, BF16, E4M3),
    ],
)
def test_attention_is_computed(
    compiled_for: Any, arch: int, dtype: torch.dtype, stored: torch.dtype
) -> None:
    compiled_for(arch, lambda: attention(dtype, stored))


def test_e4m3_is_what_an_older_gpu_lacks(compiled_for: Any) -> None:
    """Why ``check_readable`` refuses it there."""
    with pytest.raises(Exception, match="fp8e4nv not supported in this architecture"):
        compiled_for(80, lambda: move(E4M3, is_neox=True))
