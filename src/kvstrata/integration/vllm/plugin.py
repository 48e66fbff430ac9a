"""Registers the connector's name with vLLM (entry point group ``vllm.general_plugins``)."""


def register() -> None:
    """Make ``"kv_connector": "KVStrataConnector"`` work, ``DirectConnector`` and ``BlendConnector``.

    Called by vLLM in each of its processes.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, module in (
        ("KVStrataConnector", "connector"),
        ("DirectConnector", "direct"),
        ("BlendConnector", "blend.connector"),
    ):
        if name not in KVConnectorFactory._registry:  # vLLM has no public way to ask
            KVConnectorFactory.register_connector(name, f"kvstrata.integration.vllm.{module}", name)
