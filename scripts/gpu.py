"""Test and measure KVStrata on the GPU of this machine; prints one table.

    python scripts/gpu.py [--json FILE] [--mib 1024] [--skip-tests]

Needs a GPU, PyTorch for it, pytest and hypothesis; vLLM is not needed. Takes a few minutes. Exits
with 2 if there is no GPU, and with 1 if a test fails or a bound is not met.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
TESTS: Final = ("tests/kernels", "tests/gpu")
TEST_SECONDS: Final = 300.0
NO_GPU: Final = 2


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="KVStrata on the GPU of this machine.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--mib", type=int, default=1024, help="MiB copied at once; default 1024")
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    return parser.parse_args(arguments)


def problem() -> str | None:
    """Why nothing can be run here."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed: install a build of it for this machine's GPU"
    if not torch.cuda.is_available():
        return (
            f"PyTorch {torch.__version__} finds no GPU here. On a machine that has one run "
            "'make gpu', and put its table into docs/gpu.md"
        )
    return None


def run_tests() -> bool:
    """The tests that need a GPU, and the kernels compiled; whether all have passed."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", *TESTS]
    environ |= {"KERNEL_TESTS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environ, timeout=TEST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print(f"the tests took longer than {TEST_SECONDS:.0f} s")
        return False
    return done.returncode == 0


def measure(total_bytes: int) -> tuple[dict[str, Any], list[Any]]:
    """What was measured on which GPU; a line is printed for each row as it is known."""
    import torch
    from bench import gpu

    device = torch.device("cuda", 0)
    about = {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "total_bytes": total_bytes,
    }
    found = []
    for row in gpu.rows(device, total_bytes):
        found.append(row)
        print(f"{row.what}: {row.found:.2f}", file=sys.stderr)
    print(gpu.markdown(found))
    return about, found


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if (why := problem()) is not None:
        print(f"error: {why}", file=sys.stderr)
        return NO_GPU
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    passed = options.skip_tests or run_tests()
    about, found = measure(options.mib << 20)
    if options.json:
        rows = [row._asdict() | {"is_met": row.is_met} for row in found]
        tests = None if options.skip_tests else passed
        text = json.dumps({"about": about | {"tests_passed": tests}, "rows": rows}, indent=1)
        options.json.write_text(text + "\n")
    return 0 if passed and all(row.is_met for row in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
