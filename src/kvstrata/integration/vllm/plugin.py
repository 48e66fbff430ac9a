"""Registers the connector's name with vLLM (entry point group ``vllm.general_plugins``)."""


def register() -> None:
    """Make ``"kv_connector": "KVStrataConnector"`` work. Called by vLLM in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = "KVStrataConnector"
    if name not in KVConnectorFactory._registry:  # vLLM has no public way to ask
        KVConnectorFactory.register_connector(name, "kvstrata.integration.vllm.connector", name)
