"""The faults of remote engines, on a real Mooncake pool."""

from tests.remote.faults import BoundedFaults
from tests.remote.mooncake_engine import MooncakeEngine


class TestMooncakeFaults(BoundedFaults):
    engine = MooncakeEngine
