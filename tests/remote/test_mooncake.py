"""The store on a real Mooncake pool: the rules of stores, and what only it can suffer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
from tests.remote.faults import folder_of
from tests.remote.mooncake_engine import MooncakeEngine

from kvstrata.core.types import NAMESPACE_ID_BYTES, StoreKey
from kvstrata.storage.remote.mooncake.store import MooncakeNode, MooncakeStore
from kvstrata.storage.store import Store
from kvstrata.testing import StoreConformance, Traits

BLOCK_BYTES = 4096
CALL_SECONDS = 20.0  # a busy machine may need that


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeEngine]:
    engine = MooncakeEngine(handshake=True)
    engine.start(tmp_path_factory.mktemp("mooncake"))
    yield engine
    engine.stop()


def name_of(place: Path, key: StoreKey) -> str:
    return f"{folder_of(place)}/{key[:NAMESPACE_ID_BYTES].hex()}/{key[NAMESPACE_ID_BYTES:].hex()}"


class TestMooncakeStore(StoreConformance):
    traits = Traits(persistent=True, bounded=False, counts=False, variable=True)
    engine: ClassVar[MooncakeEngine]

    @pytest.fixture(autouse=True)
    def _on(self, engine: MooncakeEngine) -> None:
        type(self).engine = engine

    def open_store(self, place: Path) -> Store:
        return MooncakeStore(
            f"mooncake://127.0.0.1:{self.engine.port}",
            block_bytes=BLOCK_BYTES,
            timeout_seconds=CALL_SECONDS,
            node=MooncakeNode(prefix=folder_of(place)),
        )

    def damage(self, store: Store, place: Path, wanted: StoreKey) -> None:
        del store
        name = name_of(place, wanted)
        stored = self.engine.get(name)
        assert stored is not None
        self.engine.put(name, stored[:-1] + bytes([stored[-1] ^ 1]))

    @contextmanager
    def outage(self, store: Store, place: Path) -> Iterator[None]:
        del place
        assert isinstance(store, MooncakeStore)
        store._timeout_seconds = 1.0  # every call takes all of it
        self.engine.pause()
        try:
            yield
        finally:
            self.engine.resume()
            store._timeout_seconds = CALL_SECONDS
