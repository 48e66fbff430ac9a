"""What befalls a remote tier on a Valkey or Redis server."""

from tests.remote.faults import BoundedFaults, CredentialFaults
from tests.remote.valkey_engine import ValkeyEngine


class TestValkeyFaults(BoundedFaults, CredentialFaults):
    engine = ValkeyEngine
