"""How fast this machine's GPU copies, measured in a process of its own: no command loads torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["GpuCopies", "has_gpu", "may_have_gpu", "measure_gpu"]

_DRIVERS: Final = (Path("/dev/nvidiactl"), Path("/dev/kfd"))  # of NVIDIA, and of AMD
_OTHERS: Final = (Path("/dev/dri"), Path("/dev/accel"))  # of screens, too
_MEASURE: Final = "kvstrata.transfer.measure"
_SECONDS: Final = 120.0  # torch may take half of it to load


class GpuCopies(NamedTuple):
    """What was measured, or why it was not."""

    name: str = ""
    report: str = ""
    problem: str = ""


def has_gpu() -> bool:
    """Whether a driver is loaded of GPUs that copy by themselves, from pinned memory."""
    return any(path.exists() for path in _DRIVERS)


def may_have_gpu() -> bool:
    """Whether it is worth asking torch for a GPU, of whatever kind."""
    return has_gpu() or any(path.exists() for path in _OTHERS)


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
