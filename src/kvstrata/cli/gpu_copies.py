"""How fast this machine's GPU copies, measured in a process of its own: no command loads torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["GpuCopies", "has_gpu", "measure_gpu"]

_DEVICES: Final = (Path("/dev/nvidiactl"), Path("/dev/kfd"))  # of CUDA, and of ROCm
_MEASURE: Final = "kvstrata.transfer.cuda_measure"
_SECONDS: Final = 120.0  # torch may take half of it to load


class GpuCopies(NamedTuple):
    """What was measured, or why it was not."""

    name: str = ""
    report: str = ""
    problem: str = ""


def has_gpu() -> bool:
    """Whether a driver of GPUs is loaded."""
    return any(path.exists() for path in _DEVICES)


def measure_gpu(module: str = _MEASURE) -> GpuCopies:
    """Ask *module*, which prints JSON."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return GpuCopies(problem=f"it takes longer than {_SECONDS:.0f} s")
    except subprocess.CalledProcessError as e:
        last = (e.stderr.strip().splitlines() or ["no message"])[-1]
        return GpuCopies(problem=f"exit status {e.returncode}: {last}")
    except ValueError:
        return GpuCopies(problem="the answer is not JSON")
    if "problem" in found:
        return GpuCopies(problem=found["problem"])
    return GpuCopies(found["gpu"], found["report"])
