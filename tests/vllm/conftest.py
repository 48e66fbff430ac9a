"""The oracle that all tests of whole engines share, vLLM alone; and engines without a model."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.vllm.engine import LOGITS, Engine
from tests.vllm.oracle import Oracle

if TYPE_CHECKING:
    from tests.vllm.bench import Bench


@pytest.fixture(scope="session")
def oracle(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """Started when it is first asked; its caches are off, so every token is computed."""
    log = tmp_path_factory.mktemp("oracle") / "vllm.log"
    with Engine(tiny_llama, log, settings=LOGITS | {"enable_prefix_caching": False}) as engine:
        yield Oracle(engine)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a model's configuration, without weights."""
    from tests.vllm.plans import model_folder

    return model_folder(tmp_path)


@pytest.fixture
def bench(folder: Path) -> "Iterator[Bench]":
    """A server with 400 slots, for engines that have no model."""
    from tests.vllm.bench import start

    with start(folder, 400) as made:
        yield made
