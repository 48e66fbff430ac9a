"""KVStrata keeps the KV cache of LLM inference alive below device memory and gives it back.

Importing this package imports neither torch nor an inference engine. The names below are imported
when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstrata.core.layout import ElementType, KVCacheLayout, KVCacheLayoutType, KVGroup
    from kvstrata.manager.manager import KVManager
    from kvstrata.storage.engine import StorageEngine
    from kvstrata.storage.handles import DeviceType, StorageHandle
    from kvstrata.transfer.engine import TransferEngine

__all__ = [
    "DeviceType",
    "ElementType",
    "KVCacheLayout",
    "KVCacheLayoutType",
    "KVGroup",
    "KVManager",
    "StorageEngine",
    "StorageHandle",
    "TransferEngine",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "DeviceType": "storage.handles",
    "ElementType": "core.layout",
    "KVCacheLayout": "core.layout",
    "KVCacheLayoutType": "core.layout",
    "KVGroup": "core.layout",
    "KVManager": "manager.manager",
    "StorageEngine": "storage.engine",
    "StorageHandle": "storage.handles",
    "TransferEngine": "transfer.engine",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
