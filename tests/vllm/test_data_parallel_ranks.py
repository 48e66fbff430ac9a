"""The place of a worker in an engine that vLLM joins with others, as it does for MoE models."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.vllm.plans import full, group, model_folder, plan, vllm_config
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    get_world_group,
    init_distributed_environment,
)

from kvstrata.core.load import load_config
from kvstrata.integration.vllm.attached_worker import AttachedWorker

ENGINES = 2


def worker_of(folder: Path, engine: int, port: int) -> None:
    """In a process of its own: the only worker of *engine*; prints what it takes itself for."""
    config = vllm_config(folder)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVStrataConnector", kv_role="kv_both"
    )
    parallel = config.parallel_config
    parallel.data_parallel_size, parallel.data_parallel_rank = ENGINES, engine
    parallel.data_parallel_master_port = port
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        worker: Any = AttachedWorker(load_config({}), config, plan(config, group(full())))
    found = {
        "world": get_world_group().rank_in_group,
        "rank": worker._hello.rank,
        "start_bytes": worker.half._settings.region.start_bytes,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    worker.shutdown()


def test_workers_are_counted_within_their_engine(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    port = free_port()
    programs = [
        "from pathlib import Path; from tests.vllm.test_data_parallel_ranks import worker_of; "
        f"worker_of(Path({str(folder)!r}), {engine}, {port})"
        for engine in range(ENGINES)
    ]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE
        )
        for program in programs
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    found = [json.loads(text.splitlines()[-1]) for text in printed]
    assert found == [{"world": i, "rank": 0, "start_bytes": 0} for i in range(ENGINES)]
