"""The store on object stores keeps the contract of all stores, on S3's protocol, Azure's and Google's."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest
from tests.remote.faults import folder_of
from tests.remote.gcs_engine import GcsEngine
from tests.remote.objects_engine import AzuriteEngine, MotoEngine, ObjectEngine, RcloneEngine
from tests.remote.proxy import Fault, Proxy

from kvstrata.core.types import StoreKey
from kvstrata.storage.remote.objects.values import Names
from kvstrata.storage.store import Store
from kvstrata.storage.wrap import RetryStore
from kvstrata.testing import StoreConformance, Traits
from kvstrata.testing.samples import ONE, OTHER

BLOCK_BYTES = 4096


class _Conformance(StoreConformance):
    traits = Traits(persistent=True, bounded=False, counts=False, variable=True)
    kind: ClassVar[type[ObjectEngine]]
    engine: ClassVar[ObjectEngine]
    proxy: ClassVar[Proxy]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _running(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        cls.engine = cls.kind()
        cls.engine.start(tmp_path_factory.mktemp("engine"))
        cls.proxy = Proxy(cls.engine.address())
        yield
        cls.proxy.close()
        cls.engine.stop()

    def open_store(self, place: Path) -> Store:
        return self.engine.open(
            block_bytes=BLOCK_BYTES,
            proxy=self.proxy,
            prefix=folder_of(place),
            timeout_seconds=10.0,
        )

    def damage(self, store: Store, place: Path, wanted: StoreKey) -> None:
        name = Names(folder_of(place)).of(wanted)
        stored = bytearray(self.engine.get_object(name))
        stored[-1] ^= 0x01
        self.engine.put_object(name, bytes(stored))

    def outage(self, store: Store, place: Path) -> AbstractContextManager[None]:
        return self.proxy.failing(Fault.REFUSE)


class TestRclone(_Conformance):
    """By signed URLs, on connections that stay open."""

    kind = RcloneEngine

    def open_store(self, place: Path) -> Store:
        """Tried again, oftener than in service: it answers 500 for an object that is just replaced.

        So it does, now and then, for the first objects of a folder: they are there already.
        """
        for namespace in (ONE, OTHER):
            self.engine.put_object(f"{folder_of(place)}/{namespace.hex()}/first", b"")
        return RetryStore(super().open_store(place), attempts=10, backoff_seconds=0.002)


class TestMoto(_Conformance):
    """By signed URLs, a connection for each, written only where nothing is."""

    kind = MotoEngine


class TestAzurite(_Conformance):
    """Through obstore alone, by Azure's protocol."""

    kind = AzuriteEngine


class TestGoogle(_Conformance):
    """Likewise, by Google's."""

    kind = GcsEngine
