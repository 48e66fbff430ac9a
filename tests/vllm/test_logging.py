"""What KVStrata logs in an engine goes where vLLM's own lines go."""

import logging
from pathlib import Path

import pytest
from tests.vllm.bench import Bench, prompt
from tests.vllm.faults import Copies
from tests.vllm.plans import full, group, plan, vllm_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import RequestStatus

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


def test_lines_that_name_a_request_are_for_debugging(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Of requests that are saved, loaded, not loaded and aborted."""
    caplog.set_level(logging.DEBUG, "kvstrata")
    engine = bench.engine()
    copies = Copies(engine)
    for number, loaded_tokens in enumerate((0, 56, 56)):
        copies.failing_loads = int(number == 2)
        assert engine.serve(f"request-{number}", prompt(1, 60), 2) == loaded_tokens
        engine.forget_device()
    engine.add("request-aborted", prompt(2, 60), 20)
    engine.step()
    engine.scheduler.finish_requests("request-aborted", RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert copies.seen["failed loads of rank 0"] == 1
    ours = [record for record in caplog.records if record.name.startswith("kvstrata")]
    assert any(record.levelno >= logging.INFO for record in ours)
    assert {each.levelname for each in ours if "request-" in each.getMessage()} == {"DEBUG"}
