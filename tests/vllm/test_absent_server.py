"""What a worker that finds no server tells its operator to do."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.caches import PATIENCE_SECONDS, eventually
from tests.ports import free_port
from tests.vllm.plans import full, group, model_folder, plan, tensors, vllm_config
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)

from kvstrata.core.load import load_config
from kvstrata.integration.vllm.attached_worker import AttachedWorker
from kvstrata.integration.vllm.metadata import StepPlan

CASES = [(server, executor) for server in ("embedded", "attached") for executor in ("mp", "ray")]


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def workers_of(folder: Path, port: int) -> None:
    """In a process of its own: one worker of each case; prints what each logs."""
    config = vllm_config(folder)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVStrataConnector", kv_role="kv_both"
    )
    config.parallel_config.data_parallel_master_port = port
    logger = logging.getLogger("kvstrata.server.attach")
    found = []
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        for server, executor in CASES:
            config.parallel_config.distributed_executor_backend = executor
            settings: dict[str, Any] = {"server": server, "start_timeout_seconds": 0.1}
            if server == "attached":
                settings["socket"] = str(folder / "s")
            told = Told()
            logger.addHandler(told)
            planned = plan(config, group(full()))
            worker = AttachedWorker(load_config(settings), config, planned)
            worker.register_kv_caches(tensors(planned))
            worker.half.begin_step(StepPlan(b""))  # the engine has started
            eventually(lambda: bool(told.lines), "nothing is said")  # noqa: B023 - called at once
            worker.shutdown()
            logger.removeHandler(told)
            found += [told.lines]
    sys.stdout.write(json.dumps(found) + "\n")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    folder = model_folder(tmp_path_factory.mktemp("absent"))
    program = (
        "from pathlib import Path; from tests.vllm.test_absent_server import workers_of; "
        f"workers_of(Path({str(folder)!r}), {free_port()})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        check=True,
        timeout=6 * PATIENCE_SECONDS,
    )
    lines = json.loads(done.stdout.splitlines()[-1])
    assert [len(each) for each in lines] == [1] * len(CASES)
    return {case: line for case, (line,) in zip(CASES, lines, strict=True)}


def test_worker_of_an_engine_with_a_server_of_its_own_looks_at_the_engine(
    said: dict[tuple[str, str], str],
) -> None:
    line = said["embedded", "mp"]
    assert line.endswith(
        "\n  hint: the engine has one of its own: its log says why that does not answer"
    )


def test_worker_of_an_attached_engine_is_to_start_the_server(
    said: dict[tuple[str, str], str],
) -> None:
    hint = said["attached", "mp"].partition("hint: ")[2]
    assert hint.startswith("start one with 'kvstrata server --socket /")
    assert "Ray" not in hint


@pytest.mark.parametrize("server", ["embedded", "attached"])
def test_worker_that_ray_may_have_put_on_another_node_says_that_it_reaches_no_server_there(
    said: dict[tuple[str, str], str], server: str
) -> None:
    alone, line = (said[server, executor].partition("hint: ")[2] for executor in ("mp", "ray"))
    assert line.startswith(f"{alone}; where Ray has put this worker on another node")
    assert "run each engine on one node" in line
