"""A node of a Mooncake pool, run as a program: its memory holds the blocks, and tests command it.

Arguments: the address of the master, of the metadata server, and the bytes of its segment. One JSON
command a line on standard input, one answer a line on standard output; it ends with its input.
"""

import base64
import json
import os
import sys
import threading
import time
from typing import Any

from mooncake.store import MooncakeDistributedStore

_BUFFER_BYTES = 16 << 20
_FULL_SECONDS = 0.5
_KEEP_SECONDS = 0.2  # much less than a lease lasts


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
    return _fill(store, value * (1 << 10))


def _fill(store: Any, filler: bytes) -> int:
    """Until nothing is taken for a while: what was there before may still be evicted."""
    names: list[str] = []
    threading.Thread(target=_keep, args=(store, names), daemon=True).start()
    end = time.monotonic() + _FULL_SECONDS
    while time.monotonic() < end:
        name = f"filler/{len(names)}"
        if store.put(name, filler) == 0:
            names.append(name)
            end = time.monotonic() + _FULL_SECONDS
    return len(names)


def _keep(store: Any, names: list[str]) -> None:
    """For ever: what is asked for is not evicted soon."""
    while True:
        for name in list(names):
            store.is_exist(name)
        time.sleep(_KEEP_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
