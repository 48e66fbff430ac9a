"""Promises of the package as a whole. The order of the layers is checked by ``make lint``."""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import kvstrata

WITHOUT_ENGINE = ["core", "index", "manager", "observe", "replay", "server", "storage"]

SAY_CUDA = {
    "core/spellings_of_flexkv.py",  # of its settings
    "bench/contenders.py",  # vLLM's own worker needs it
    "bench/native_tiering.py",  # the same
    "integration/vllm/blend/supported.py",  # as vLLM calls all GPUs
}


def modules_of(layer: str) -> list[str]:
    package = importlib.import_module(f"kvstrata.{layer}")
    found = pkgutil.walk_packages(package.__path__, prefix=f"{package.__name__}.")
    return [package.__name__, *(module.name for module in found)]


def loaded_after_import_of(modules: list[str]) -> set[str]:
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *modules],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,  # far more than any import takes
    )
    return set(done.stdout.split())


def test_importing_the_package_imports_neither_torch_nor_an_engine() -> None:
    assert loaded_after_import_of(["kvstrata"]).isdisjoint({"torch", "vllm", "numpy"})


@pytest.mark.parametrize("layer", WITHOUT_ENGINE)
def test_a_layer_below_the_integration_imports_neither_torch_nor_an_engine(layer: str) -> None:
    assert loaded_after_import_of(modules_of(layer)).isdisjoint({"torch", "vllm"})


@pytest.mark.parametrize("layer", WITHOUT_ENGINE)
def test_examples_in_docstrings_are_true(layer: str) -> None:
    failed = [
        name
        for name in modules_of(layer)
        if doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed
    ]
    assert failed == []


def test_the_package_tells_type_checkers_that_it_is_typed() -> None:
    assert (files(kvstrata) / "py.typed").is_file()


def test_what_is_of_cuda_is_in_files_of_that_name() -> None:
    """CUDA graphs are vLLM's, and it calls those of any GPU so."""
    root = Path(str(files(kvstrata)))
    named = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"cuda(?!\s*graph)", path.read_text(), re.IGNORECASE)
    }
    assert {name for name in named if not name.startswith("transfer/cuda_")} == SAY_CUDA
