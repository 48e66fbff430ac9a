"""The connector under UCM's names: of ``kv_connector_module_path`` only the package changes."""

from kvstrata.integration.vllm.connector import KVStrataConnector as UCMConnector

__all__ = ["UCMConnector"]
