"""Test and measure KVStrata on the GPU of this machine; prints one table.

    python scripts/gpu.py [--json FILE] [--mib 1024] [--skip-tests]

Needs a GPU, PyTorch for it, pytest and hypothesis. Where vLLM is installed too, its own batch copy is
measured beside ours, and engines with KVStrata and without are compared. Takes ten minutes at most:
what is not measured by then is left out, and if the GPU does not come back from what it was asked by
then, the process is ended. Exits with 2 if there is no GPU, and with 1 if something is left out, a
test fails, an engine does, or a bound is not met.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
TESTS: Final = ("tests/kernels", "tests/gpu")
TEST_SECONDS: Final = 300.0
ALL_SECONDS: Final = 590.0  # what is cut short needs a moment to end
END_SECONDS: Final = 8.0  # that moment, behind which the process is ended
NO_GPU: Final = 2


class Report:
    """What is known so far."""

    def __init__(self, file: Path | None) -> None:
        self.about: dict[str, Any] = {"failed": None, "tests_passed": None, "told": []}
        self.rows: list[Any] = []
        self._file = file

    def fail(self, why: str) -> None:
        self.about["failed"] = why
        print(f"error: {why}", file=sys.stderr)

    def tell(self) -> None:
        """Print the table; and write all of it, if there is a file for that."""
        from bench.gpu_rows import markdown

        print(markdown(self.rows), flush=True)
        if self._file:
            rows = [row._asdict() | {"is_met": row.is_met} for row in self.rows]
            text = json.dumps({"about": self.about, "rows": rows}, indent=1)
            self._file.write_text(text + "\n")

    @property
    def status(self) -> int:
        about = self.about
        passed = about["failed"] is None and about["tests_passed"] is not False
        return 0 if passed and all(row.is_met for row in self.rows) else 1


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
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider"]
    command += ["-W", "default", *TESTS]  # of versions that this repository does not choose
    environ |= {"KERNEL_TESTS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environ, timeout=TEST_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print(f"the tests took longer than {TEST_SECONDS:.0f} s")
        return False
    return done.returncode == 0


@contextmanager
def cut_after(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` in what takes longer, in the main thread."""

    def cut(*_: object) -> None:
        raise TimeoutError("ten minutes are over: the rest is left out")

    before = signal.signal(signal.SIGALRM, cut)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))  # 0 would be never
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def ended_after(seconds: float, last_words: Callable[[], None]) -> Iterator[None]:
    """End this process if it takes longer, whatever its main thread is in.

    No signal interrupts a call of the GPU's driver that hangs.
    """
    is_over = threading.Event()

    def watch() -> None:
        if is_over.wait(seconds):
            return
        try:
            last_words()
        finally:
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def measure(report: Report, total_bytes: int, seconds: float) -> None:
    """Add to *report* what is measured within *seconds*; a line is printed for each row."""
    try:
        with cut_after(seconds):
            import torch
            from bench import gpu_about

            report.about |= gpu_about.about(torch.device("cuda", 0))
            with gpu_about.told(report.about["told"]), closing(rows(total_bytes)) as each:
                for row in each:
                    report.rows.append(row)
                    print(f"{row.what}: {row.found:.2f}", file=sys.stderr)
    except Exception as e:  # noqa: BLE001 - what was found before is told nevertheless
        report.fail(f"{type(e).__name__}: {e}")


def rows(total_bytes: int) -> Generator[Any]:
    """In the order of docs/gpu.md: what has a bound comes first, with what its engines tell."""
    import torch
    from bench import gpu, gpu_beside, gpu_blend, gpu_native, gpu_serving

    device = torch.device("cuda", 0)
    yield from gpu.rows(device, total_bytes)
    yield from gpu_beside.rows(device, total_bytes)
    if gpu_serving.is_vllm_installed():
        torch.cuda.empty_cache()  # the engines take what is free
        with tempfile.TemporaryDirectory(prefix="kvstrata-gpu-") as folder:
            yield from gpu_serving.rows(Path(folder))
            yield from gpu_serving.rows(Path(folder), gpu_serving.FAST, ["blockwise"])
            yield from gpu_blend.rows(Path(folder))
    else:
        print("vLLM is not installed here: nothing is compared with it", file=sys.stderr)
    yield from gpu_beside.busy_rows(device, total_bytes)
    if (native := gpu_native.find_native(device)) is not None:
        yield from gpu_native.rows(device, native, total_bytes)


def main(arguments: Sequence[str]) -> int:
    end, options = time.monotonic() + ALL_SECONDS, parse(arguments)
    if (why := problem()) is not None:
        print(f"error: {why}", file=sys.stderr)
        return NO_GPU
    sys.path[:0] = paths = [str(ROOT / "src"), str(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of the engines
    report = Report(options.json)
    report.about["total_bytes"] = total_bytes = options.mib << 20

    def give_up() -> None:
        report.fail("ten minutes are over, and a call hangs: the rest is left out")
        report.tell()

    with ended_after(end + END_SECONDS - time.monotonic(), give_up):
        if not options.skip_tests:
            report.about["tests_passed"] = run_tests()
        measure(report, total_bytes, end - time.monotonic())
    report.tell()
    return report.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
