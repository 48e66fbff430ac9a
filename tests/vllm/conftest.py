"""The oracle that all tests of whole engines share: vLLM alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vllm.engine import Engine
from tests.vllm.oracle import Oracle


@pytest.fixture(scope="session")
def oracle(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """Started when it is first asked; its caches are off, so every token is computed."""
    log = tmp_path_factory.mktemp("oracle") / "vllm.log"
    with Engine(tiny_llama, log, settings={"enable_prefix_caching": False}) as engine:
        yield Oracle(engine)
