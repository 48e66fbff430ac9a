"""The faults of all remote engines, on an object store."""

from typing import ClassVar

from tests.remote.faults import RemoteFaults
from tests.remote.objects_engine import RcloneEngine
from tests.remote.subject import RemoteEngine


class TestObjectFaults(RemoteFaults):
    engine: ClassVar[type[RemoteEngine]] = RcloneEngine
