"""A node of a Mooncake pool, run as a program: its memory holds the blocks, and tests command it.

Arguments: the address of the master, of the metadata server, and the bytes of its segment. One JSON
command a line on standard input, one answer a line on standard output; it ends with its input.
"""

import base64
import itertools
import json
import os
import sys
import time
from typing import Any

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

_BUFFER_BYTES = 16 << 20
_FULL_SECONDS = 0.5
_FILLER_BYTES = 1 << 20, 1 << 16
_numbers = itertools.count()  # of fillers: what is put again under its name takes no room


def main(master: str, metadata: str, segment_bytes: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the library prints
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", metadata, int(segment_bytes), _BUFFER_BYTES, "tcp", "", master)
    print(json.dumps([code, store.get_hostname()]), file=answers)
    for line in sys.stdin:
        command, name, value = json.loads(line)
        print(json.dumps(_do(store, command, name, base64.b64decode(value))), file=answers)
    os._exit(0)


def _do(store: Any, command: str, name: str, value: bytes) -> object:
    if command == "get":
        if store.is_exist(name) != 1:
            return None
        return base64.b64encode(store.get(name)).decode()
    if command == "put":
        store.remove(name, True)
        return store.put(name, value)
    _fill(store)
    return None


def _fill(store: Any) -> None:
    """Nothing of it is ever evicted; until nothing is taken for a while, of any size."""
    store.remove_all(True)
    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    for size in _FILLER_BYTES:
        end = time.monotonic() + _FULL_SECONDS
        while time.monotonic() < end:
            if store.put(f"filler/{next(_numbers)}", bytes(size), pinned) == 0:
                end = time.monotonic() + _FULL_SECONDS


if __name__ == "__main__":
    main(*sys.argv[1:])
