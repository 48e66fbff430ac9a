"""Servers that several tests ask."""

from collections.abc import Iterator

import pytest
from tests.remote.objects_engine import RcloneEngine


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RcloneEngine]:
    engine = RcloneEngine()
    engine.start(tmp_path_factory.mktemp("engine"))
    yield engine
    engine.stop()
