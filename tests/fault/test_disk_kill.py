"""A store whose process is killed at any moment serves what it acknowledged and nothing wrong."""

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from tests.disks import listed_keys

from kvstrata.core.errors import ConfigError
from kvstrata.core.types import NamespaceId, Read, StoreKey, Write
from kvstrata.storage import journal
from kvstrata.storage.disk import DiskStore
from kvstrata.storage.disk_check import check_store

BLOCK_BYTES = 16384
SLOTS = 64
KILLS = 200
KILLS_OF_A_STORE = 10
LONGEST_LIFE_SECONDS = 0.12
NAMESPACES = (b"a" * 16, b"b" * 16)


def make(paths: Sequence[Path]) -> DiskStore:
    return DiskStore(
        paths,
        block_bytes=BLOCK_BYTES,
        capacity_bytes=SLOTS * (BLOCK_BYTES + 4096),
        max_blocks_per_file=20,
    )


def content(key: StoreKey) -> bytes:
    return (key * (BLOCK_BYTES // len(key) + 1))[:BLOCK_BYTES]


def live(paths: Sequence[Path], diary: int, seed: int) -> NoReturn:
    """Open the store and use it in a thread for each namespace until killed."""
    journal.COMPACT_RECORDS, journal.COMPACT_FACTOR = 48, 1  # type: ignore[misc] # often, here
    store = make(paths)
    for namespace in NAMESPACES:
        threading.Thread(target=work, args=(store, namespace, diary, seed)).start()
    while True:
        signal.pause()


def work(store: DiskStore, namespace: NamespaceId, diary: int, seed: int) -> NoReturn:
    """Write, remove, drop and compact; tell *diary* before and after each call.

    "* key" before a write, "+ key" when it is stored, "? prefix" before all keys with a prefix
    are removed or dropped, "! prefix" when they are gone.
    """
    choose = random.Random(seed + namespace[0])

    def say(mark: str, name: bytes) -> None:
        os.write(diary, f"{mark} {name.hex()}\n".encode())

    try:
        while True:
            keys = [namespace + choose.randbytes(1) * 32 for _ in range(choose.randrange(1, 9))]
            for key in keys:
                say("*", key)
            fates = store.write(keys, [None] * len(keys), [memoryview(content(k)) for k in keys])
            for key, fate in zip(keys, fates, strict=True):
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
    finally:
        os._exit(3)  # this thread has failed


def run_and_kill(paths: Sequence[Path], diary: Path, seed: int, life_seconds: float) -> list[str]:
    """What a child wrote into *diary* that was killed after *life_seconds*."""
    with diary.open("wb") as lines:
        child = os.fork()
        if child == 0:
            try:
                live(paths, lines.fileno(), seed)
            finally:
                os._exit(2)  # whatever happens, no second pytest goes on from here
    time.sleep(life_seconds)  # the moment of the kill
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the child ended by itself with status {status}"
    return diary.read_text().splitlines()


class Ledger:
    """What the lines of a child say: keys that must be there, and keys that may be."""

    def __init__(self, certain: set[StoreKey], calls: int = 0) -> None:
        self.certain = certain
        self.possible = set(certain)
        self.calls = calls

    def read(self, line: str) -> None:
        mark, text = line.split()
        name = bytes.fromhex(text)
        if mark == "*":
            self.possible.add(name)
        elif mark == "+":
            self.certain.add(name)
            self.calls += 1
        elif mark == "?":
            self.certain = {key for key in self.certain if not key.startswith(name)}
        else:
            self.possible = {key for key in self.possible if not key.startswith(name)}
            self.calls += 1


def read_all(store: DiskStore) -> dict[StoreKey, bytes]:
    """Every block that the store has, and no block is damaged."""
    found = listed_keys(store)
    buffers = [memoryview(bytearray(b"\xee" * BLOCK_BYTES)) for _ in found]
    assert store.read_into(found, buffers) == [Read.HIT] * len(found)
    return {key: bytes(buffer) for key, buffer in zip(found, buffers, strict=True)}


def test_every_acknowledged_block_survives_200_kills_and_nothing_wrong_is_served(
    tmp_path: Path,
) -> None:
    choose = random.Random(20)
    diary = tmp_path / "diary"
    kept: set[StoreKey] = set()
    certain = served = wrong = torn = stored_or_gone = 0
    for number in range(KILLS):
        if number % KILLS_OF_A_STORE == 0:
            kept = set()
        paths = [tmp_path / str(number // KILLS_OF_A_STORE) / side for side in ("one", "two")]
        ledger = Ledger(kept)
        for line in run_and_kill(
            paths, diary, number, choose.random() ** 1.5 * LONGEST_LIFE_SECONDS
        ):
            ledger.read(line)
        if all((path / "kvstrata.superblock").exists() for path in paths):
            report = check_store(paths)
            assert not report.damaged_blocks
            assert not report.lost_blocks
            torn += report.torn_bytes > 0
        store = make(paths)
        found = read_all(store)
        assert found.keys() <= ledger.possible
        assert store.statistics().corrupt_blocks == 0
        store.close()
        certain += len(ledger.certain)
        served += len(ledger.certain & found.keys())
        wrong += sum(block != content(key) for key, block in found.items())
        stored_or_gone += ledger.calls
        kept = set(found)
    print(  # noqa: T201 - pytest -rP shows it
        f"{KILLS} kills after {stored_or_gone} blocks stored or removed: {served} of {certain} "
        f"acknowledged blocks served, {torn} journals torn, wrong blocks served: {wrong}"
    )
    assert wrong == 0
    assert served == certain > KILLS


def test_a_second_process_is_refused_while_the_first_lives_and_not_after_its_death(
    tmp_path: Path,
) -> None:
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _store = make([tmp_path])  # held until the kill
            os.write(told, b"!")
            time.sleep(60)  # until killed
        finally:
            os._exit(2)
    assert os.read(ready, 1) == b"!"
    for end in (ready, told):
        os.close(end)
    with pytest.raises(ConfigError, match=f"in use by process {child}"):
        DiskStore(
            [tmp_path],
            block_bytes=BLOCK_BYTES,
            capacity_bytes=SLOTS * (BLOCK_BYTES + 4096),
            max_blocks_per_file=20,
            lock_timeout_seconds=0,
        )
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    make([tmp_path]).close()
