"""What KVStrata logs in an engine goes where vLLM's own lines go."""

import logging
from pathlib import Path

import pytest
from tests.vllm.plans import full, group, plan, vllm_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm.connector import KVStrataConnector


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def test_a_line_is_written_once_also_where_the_root_logger_has_handlers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_vllm, of_the_root = Lines(), Lines()
    ours, theirs = logging.getLogger("kvstrata"), logging.getLogger("vllm")
    for logger, handlers in ((ours, []), (theirs, [of_vllm]), (logging.root, [of_the_root])):
        monkeypatch.setattr(logger, "handlers", handlers)
    for setting in ("propagate", "level"):
        monkeypatch.setattr(ours, setting, getattr(ours, setting))
    monkeypatch.setattr(theirs, "propagate", False)
    monkeypatch.setattr(theirs, "level", logging.INFO)  # as vLLM sets it up, once it does
    config = vllm_config(folder)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVStrataConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"attention_hook": "none:none"},
    )
    with pytest.raises(ConfigError):
        KVStrataConnector(config, KVConnectorRole.SCHEDULER, plan(config, group(full())))
    logging.getLogger("kvstrata.test").warning("a line")
    assert (of_vllm.seen[-1:], of_the_root.seen) == (["a line"], [])
