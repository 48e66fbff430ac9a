"""The blending connector under UCM's names: of ``kv_connector_module_path`` only the package changes."""

from kvstrata.integration.vllm.blend.connector import BlendConnector

__all__ = ["BlendConnector", "UCMBlendConnector"]

UCMBlendConnector = BlendConnector
