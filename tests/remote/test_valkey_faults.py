"""What befalls a remote tier on a Valkey or Redis server."""

from tests.remote.faults import RemoteFaults
from tests.remote.valkey_engine import ValkeyEngine


class TestValkeyFaults(RemoteFaults):
    engine = ValkeyEngine
