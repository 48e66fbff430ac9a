"""The faults of all remote engines, on object stores, and those of a store that is full."""

from contextlib import closing
from typing import ClassVar

from tests.remote.faults import (
    BLOCK_BYTES,
    PROMPT,
    CredentialFaults,
    Node,
    ProtocolFaults,
    RemoteFaults,
    save_in_vain,
)
from tests.remote.gcs_engine import GcsEngine
from tests.remote.objects_engine import (
    KEY_ID,
    SECRET,
    AzuriteEngine,
    MotoEngine,
    RcloneEngine,
    environment,
)
from tests.remote.odd_server import OddServer, answer
from tests.remote.subject import RemoteEngine

from kvstrata.storage.remote.objects.store import ObjectAccess, ObjectStore


class TestObjectFaults(RemoteFaults, CredentialFaults):
    engine: ClassVar[type[RemoteEngine]] = RcloneEngine

    def test_a_server_whose_disk_is_full_refuses(self, running: RcloneEngine) -> None:
        running.kill()
        running.restart()
        running.fill()
        node = Node(self.open(running))
        node.save(PROMPT)
        assert not node.drain(0.5)
        assert node.load() == len(PROMPT)  # from host memory
        assert node.faults().keys() == {"refused"}
        node.close()
        running.kill()
        running.restart()


class TestMotoFaults(ProtocolFaults):
    """Where a block is written only if there is none, and each request has its connection."""

    engine: ClassVar[type[RemoteEngine]] = MotoEngine


class TestAzureFaults(CredentialFaults):
    """Where values come and go through obstore."""

    engine: ClassVar[type[RemoteEngine]] = AzuriteEngine


class TestGoogleFaults(ProtocolFaults):
    """Likewise, by Google's protocol."""

    engine: ClassVar[type[RemoteEngine]] = GcsEngine


def test_an_object_store_without_room_fails_no_request() -> None:
    full = answer("507 Insufficient Storage", b"<Error><Code>XMinioStorageFull</Code></Error>")
    missing = answer("404 Not Found")
    server = OddServer(lambda request: full if request.method == "PUT" else missing)
    with (
        closing(server),
        environment({"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET}),
    ):
        access = ObjectAccess(endpoint=f"http://127.0.0.1:{server.port}")
        node = Node(ObjectStore("s3://bucket/prefix", block_bytes=BLOCK_BYTES, access=access))
        save_in_vain(node)
        node.close()
