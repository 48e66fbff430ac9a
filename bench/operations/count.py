"""Counts what calls do, in numbers that neither the clock nor the machine nor its other users change."""

import contextlib
import gc
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, ParamSpec, TypeVar

__all__ = [
    "ALLOCATED_BYTES",
    "C_CALLS",
    "INSTRUCTIONS",
    "SYSTEM_CALLS",
    "Count",
    "Measure",
    "Sample",
    "allocations",
    "code",
    "nothing",
]

P = ParamSpec("P")
T = TypeVar("T")

INSTRUCTIONS: Final = "instructions"
C_CALLS: Final = "C calls"
SYSTEM_CALLS: Final = "system calls"
ALLOCATED_BYTES: Final = "allocated bytes"

Sample = Counter[str]
Measure = Callable[[Sample], contextlib.AbstractContextManager[None]]
"""Adds what this thread does within it to a sample."""

# Of the interpreter's modules those whose functions ask the operating system.
_SYSTEM_MODULES: Final = frozenset({"fcntl", "mmap", "posix", "select", "socket", "_socket"})
_NO_SYSTEM_CALLS: Final = frozenset({"fileno", "fspath"})
_LEAST_BYTES: Final = 4096  # less may come from free lists, as luck has it
_BENCH: Final = str(Path(__file__).parents[1])


@contextlib.contextmanager
def nothing(_: Sample) -> Iterator[None]:
    """Measures nothing."""
    yield


@contextlib.contextmanager
def code(sample: Sample) -> Iterator[None]:
    """Bytecode instructions, calls into C, and those of them that ask the operating system."""
    instructions = c_calls = system_calls = 0

    def on_instruction() -> None:
        nonlocal instructions
        instructions += 1

    def on_profile(frame: FrameType, event: str, function: Any) -> None:
        nonlocal c_calls, system_calls
        if event == "c_call" and not _is_ours(frame):
            c_calls += 1
            system_calls += _is_system_call(function)

    before = sys.getprofile()
    sys.setprofile(on_profile)
    try:
        with _each_instruction(on_instruction):
            yield
    finally:
        sys.setprofile(before)
    sample.update({INSTRUCTIONS: instructions, C_CALLS: c_calls, SYSTEM_CALLS: system_calls})


@contextlib.contextmanager
def allocations(sample: Sample) -> Iterator[None]:
    """Bytes by which memory has grown within an instruction, 4 KiB at least, summed up.

    numpy does its work in one call and puts the result into fresh memory, so this tells of how
    many elements it was asked for; what it does in place is not seen.
    """
    grown = base = 0

    def on_instruction() -> None:
        nonlocal grown, base
        more = tracemalloc.get_traced_memory()[1] - base
        if more >= _LEAST_BYTES:
            grown += more
        tracemalloc.reset_peak()
        base = tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        with _each_instruction(on_instruction):
            yield
        on_instruction()
    finally:
        tracemalloc.stop()
    sample[ALLOCATED_BYTES] += grown


@contextlib.contextmanager
def _each_instruction(call: Callable[[], None]) -> Iterator[None]:
    """Have *call* made before each instruction of code that is not of this folder."""

    def on_frame(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if _is_ours(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return on_event

    def on_event(_: FrameType, event: str, __: Any) -> Callable[..., Any]:
        if event == "opcode":
            call()
        return on_event

    before = sys.gettrace()
    sys.settrace(on_frame)
    try:
        yield
    finally:
        sys.settrace(before)


class Count:
    """Makes calls and adds what they do to ``sample``; code of the benchmarks is left out.

    Of several threads that call, one waits until another's call has ended.
    """

    def __init__(self) -> None:
        self.sample: Sample = Counter()
        self.measure: Measure = nothing
        self._turn = threading.Lock()

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What *call* returns. No garbage is collected meanwhile."""
        with self._turn:
            enabled = gc.isenabled()
            gc.disable()
            try:
                with self.measure(self.sample):
                    return call(*args, **kwargs)
            finally:
                if enabled:
                    gc.enable()


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_BENCH)


def _is_system_call(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    module = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__module__
    return module in _SYSTEM_MODULES and function.__name__ not in _NO_SYSTEM_CALLS
