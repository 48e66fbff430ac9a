"""The kernels, interpreted: in a process of its own, because triton reads how when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_kernels_do_what_their_references_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/kernels", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {"KERNEL_TESTS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,  # less than pytest's own, which would say nothing of what was run
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
