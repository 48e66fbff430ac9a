"""The small random model that demonstrations write."""

import subprocess
import sys
from pathlib import Path

_FORKED = """
import os, signal, sys
from pathlib import Path
import torch
from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

torch.set_num_threads(2)
shape = TinyLlama(hidden_size=1024, intermediate_size=2048, heads=32, layers=1)
write_tiny_llama(Path(sys.argv[1]), shape)
assert torch.get_num_threads() == 2
if not (child := os.fork()):
    signal.alarm(60)  # where it hangs
    product = torch.ones(1024, 1024) @ torch.ones(1024, 1024)
    os._exit(int(product.sum()) != 1024**3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_an_engine_can_be_forked_from_the_process_that_has_written_it(tmp_path: Path) -> None:
    """As vLLM does on GPUs, where torch's threads are missed by what they are a part of."""
    command = [sys.executable, "-W", "ignore", "-c", _FORKED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "0\n"
