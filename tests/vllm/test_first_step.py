"""What vLLM runs of its own accord is no step: a worker's first one comes behind all warming up."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.plans import model_folder

ROOT = Path(__file__).parents[2]


def run(folder: Path) -> None:
    """In a process of its own: prints whether a step has begun, of an engine that does this and that."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    transfer = KVTransferConfig(
        kv_connector="KVStrataConnector",
        kv_role="kv_both",
        kv_connector_module_path="kvstrata.integration.vllm.connector",
    )
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        kv_transfer_config=transfer,
    )
    connector: Any = get_kv_transfer_group()
    half = connector._copies.half
    begun = [half.has_begun]
    llm.collective_rpc("execute_dummy_batch")
    begun.append(half.has_begun)
    sampling = SamplingParams(max_tokens=2, detokenize=False)
    llm.generate([{"prompt_token_ids": list(range(40))}], sampling, use_tqdm=False)
    begun.append(half.has_begun)
    sys.stdout.write(json.dumps({"begun": begun}) + "\n")


@pytest.mark.vllm
def test_warming_up_and_dummy_batches_are_no_steps(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    program = (
        "from pathlib import Path; from tests.vllm.test_first_step import run; "
        f"run(Path({str(folder)!r}))"
    )
    settings = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=240,  # as long as an engine may take to start
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"begun": [False, False, True]}
