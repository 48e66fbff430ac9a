"""A store whose process is killed at any moment serves what it acknowledged and nothing wrong."""

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

from kvstrata.core.types import Read, StoreKey
from kvstrata.storage.disk import DiskStore

BLOCK_BYTES = 65536
SLOTS = 64
KILLS = 8
WAIT_SECONDS = 30

# Writes, removes and drops at random; prints "* key" before a write, "+ key" when it is stored,
# "? prefix" before all keys with a prefix are removed or dropped, "! prefix" when they are gone.
# One thread per namespace, so that the lines of one namespace are in order.
_CHILD = """
import os, random, sys, threading
from pathlib import Path
from kvstrata.core.types import Write
from kvstrata.storage.disk import DiskStore

store = DiskStore([Path(sys.argv[1])], block_bytes=65536, capacity_bytes=64 * (65536 + 4096),
                  max_blocks_per_file=20)

def say(mark, name):
    os.write(1, f"{mark} {name.hex()}\\n".encode())

def work(namespace):
    choose = random.Random()
    while True:
        keys = [namespace + choose.randbytes(1) * 32 for _ in range(choose.randrange(1, 9))]
        for key in keys:
            say("*", key)
        buffers = [memoryview((key * 1366)[:65536]) for key in keys]
        for key, fate in zip(keys, store.write(keys, [None] * len(keys), buffers)):
            if fate is not Write.FULL:
                say("+", key)
        for key in choose.sample(keys, len(keys) // 2):
            say("?", key)
            store.remove([key])
            say("!", key)
        if choose.random() < 0.05:
            say("?", namespace)
            store.drop_namespace(namespace)
            say("!", namespace)

for namespace in (b"a" * 16, b"b" * 16):
    threading.Thread(target=work, args=(namespace,)).start()
"""


class Ledger:
    """What the lines of a child say: keys that must be there, and keys that may be."""

    def __init__(self) -> None:
        self.certain: set[StoreKey] = set()
        self.possible: set[StoreKey] = set()

    def read(self, line: str) -> None:
        mark, text = line.split()
        name = bytes.fromhex(text)
        if mark == "*":
            self.possible.add(name)
        elif mark == "+":
            self.certain.add(name)
        elif mark == "?":
            self.certain = {key for key in self.certain if not key.startswith(name)}
        else:
            self.possible = {key for key in self.possible if not key.startswith(name)}


def run_and_kill(path: Path, after_lines: int) -> list[str]:
    """The complete lines of a child that was killed when it had printed *after_lines*."""
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as child:
        assert child.stdout is not None
        deadline = threading.Timer(WAIT_SECONDS, child.kill)
        deadline.start()
        lines = [child.stdout.readline() for _ in range(after_lines)]
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
        deadline.cancel()
    assert child.returncode == -signal.SIGKILL
    return [line for line in lines if line.endswith("\n")]


def test_every_acknowledged_block_survives_kills_and_nothing_wrong_is_served(
    tmp_path: Path,
) -> None:
    choose = random.Random(20)
    ledger = Ledger()
    for _ in range(KILLS):
        for line in run_and_kill(tmp_path / "store", choose.randrange(1, 250)):
            ledger.read(line)
        store = DiskStore(
            [tmp_path / "store"],
            block_bytes=BLOCK_BYTES,
            capacity_bytes=SLOTS * (BLOCK_BYTES + 4096),
            max_blocks_per_file=20,
            lock_timeout_seconds=10,
        )
        found = [block.key for block in store.blocks()]
        assert ledger.certain <= set(found) <= ledger.possible
        buffers = [memoryview(bytearray(b"\xee" * BLOCK_BYTES)) for _ in found]
        assert store.read_into(found, buffers) == [Read.HIT] * len(found)
        for key, buffer in zip(found, buffers, strict=True):
            assert buffer == (key * 1366)[:BLOCK_BYTES]
        assert store.statistics().corrupt_blocks == 0
        store.close()
        ledger.certain, ledger.possible = set(found), set(found)
