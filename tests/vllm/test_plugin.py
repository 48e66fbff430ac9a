"""vLLM finds the connector by its name alone."""

from importlib.metadata import entry_points

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvstrata.integration.vllm.blend.connector import BlendConnector
from kvstrata.integration.vllm.connector import KVStrataConnector
from kvstrata.integration.vllm.direct import DirectConnector
from kvstrata.integration.vllm.plugin import register


@pytest.mark.parametrize("connector", [KVStrataConnector, DirectConnector, BlendConnector])
def test_the_name_is_enough_once_vllm_has_loaded_its_plugins(connector: type) -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="kvstrata")
    plugin.load()()
    transfer = KVTransferConfig(kv_connector=connector.__name__, kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(transfer) is connector


def test_a_plugin_that_is_loaded_twice_registers_once() -> None:
    register()
    register()
    assert "KVStrataConnector" in KVConnectorFactory._registry
