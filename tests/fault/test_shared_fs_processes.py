"""Several processes in one shared store, some killed: every read is right or a miss."""

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

from kvstrata.core.types import Read
from kvstrata.storage.shared_fs import SharedFsStore, Times

BLOCK_BYTES = 65536
CAPACITY_BLOCKS = 40
PROCESSES = 4
KILLS = 24
OPERATIONS_AFTER = 150
WAIT_SECONDS = 60  # only a broken store takes that long
AT_ONCE = Times(lease_seconds=0, census_seconds=0, abandoned_seconds=0)

# Writes, reads, removes, drops, sweeps at random, one line for each operation; a line "wrong ..."
# is a read that gave other bytes than were written for its key.
_CHILD = """
import mmap, os, random, sys
from pathlib import Path
from kvstrata.core.types import Read
from kvstrata.storage.shared_fs import SharedFsStore, Times

path, seed, operations = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
store = SharedFsStore(
    path, block_bytes=65536, capacity_bytes=40 * (65536 + 4096),
    times=Times(touch_seconds=0.05, lease_seconds=0.05, census_seconds=0.2),
)
choose = random.Random(seed)
spaces = [memoryview(mmap.mmap(-1, 65536)) for _ in range(4)]

def content(key):
    length = 65536 if key[-1] % 2 else 65536 - key[-1]
    return (key * 1366)[:length]

def some_keys():
    namespace = choose.choice([b"a", b"b"]) * 16
    return [namespace + bytes([choose.randrange(40)]) * 32 for _ in range(choose.randrange(1, 5))]

def write():
    keys = some_keys()
    store.write(keys, [None] * len(keys), [memoryview(content(key)) for key in keys])
    return "written"

def read():
    keys = some_keys()
    buffers = [space[:] for space, _ in zip(spaces, keys)]
    for buffer in buffers:
        buffer[:] = b"\\xee" * len(buffer)
    fates = store.read_into(keys, buffers)
    for key, fate, buffer in zip(keys, fates, buffers):
        expected = content(key)
        if fate is Read.CORRUPT or fate is Read.HIT and buffer[:len(expected)] != expected:
            return f"wrong {fate} {key.hex()}"
    return "hit" if Read.HIT in fates else "missed"

def change():
    if choose.random() < 0.1:
        store.drop_namespace(b"b" * 16)
    else:
        store.remove(some_keys()[:1])
    return "removed"

def sweep():
    return f"evicted {store.sweep()}"

def line():
    operation = choose.choices([write, read, change, sweep], [6, 6, 1, 2])[0]
    return f"{operation()}\\n".encode()

done = 0
while done != operations:
    os.write(1, line())
    done += 1
"""


class Child:
    """A process that works on the store; its lines are collected as they come."""

    def __init__(self, path: Path, seed: int, operations: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(path), str(seed), str(operations)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.lines: list[str] = []
        self.has_worked = threading.Event()
        self._reader = threading.Thread(target=self._collect)
        self._reader.start()

    def _collect(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            self.has_worked.set()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.finish()

    def finish(self) -> str:
        """Wait for the end; what it wrote to stderr."""
        deadline = threading.Timer(WAIT_SECONDS, self.process.kill)
        deadline.start()
        assert self.process.stderr is not None
        with self.process:
            errors = self.process.stderr.read()
            self._reader.join()
        deadline.cancel()
        return errors


def test_nodes_that_write_read_evict_and_die_at_random_never_see_a_wrong_byte(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store"
    choose = random.Random(7)
    lines: list[str] = []
    children = [Child(path, seed, -1) for seed in range(PROCESSES)]
    for seed in range(PROCESSES, PROCESSES + KILLS):
        victim = children.pop(0)
        assert victim.has_worked.wait(WAIT_SECONDS), victim.finish()
        victim.has_worked.clear()
        victim.has_worked.wait(choose.random() * 0.02)  # not always at the same place
        victim.kill()
        lines += victim.lines
        children.append(Child(path, seed, -1 if seed < KILLS else OPERATIONS_AFTER))
    for child in children:
        assert child.finish() == ""
        assert child.process.returncode == 0
        lines += child.lines

    assert [line for line in lines if line.startswith("wrong")] == []
    assert {"written", "hit", "missed", "removed"} <= set(lines)
    assert sum(int(line.split()[1]) for line in lines if line.startswith("evicted")) > 0

    store = SharedFsStore(
        path,
        block_bytes=BLOCK_BYTES,
        capacity_bytes=CAPACITY_BLOCKS * (BLOCK_BYTES + 4096),
        times=AT_ONCE,
    )
    store.sweep()
    files = [file for file in (path / "blocks").rglob("*") if file.is_file()]
    keys = [bytes.fromhex(file.parts[-3]) + bytes.fromhex(file.name) for file in files]
    assert 0 < len(keys) <= CAPACITY_BLOCKS
    assert store.statistics().blocks == len(keys)
    buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
    assert store.read_into(keys, buffers) == [Read.HIT] * len(keys)
    assert list((path / "kvstrata.trash").iterdir()) == []
