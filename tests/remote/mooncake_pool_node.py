"""A node of a Mooncake pool, run as a program: its memory holds the blocks, and tests command it.

Arguments: the address of the master, of the metadata server, and the bytes of its segment. One JSON
command a line on standard input, one answer a line on standard output; it ends with its input.
"""

import base64
import json
import os
import sys
import time
from typing import Any

from mooncake.store import MooncakeDistributedStore

_BUFFER_BYTES = 16 << 20
_FULL_SECONDS = 0.5


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
    filler = value * (1 << 10)
    number, end = 0, time.monotonic() + _FULL_SECONDS
    while time.monotonic() < end:  # what was there before may still be evicted
        if store.put(f"filler/{number}", filler) == 0:
            store.is_exist(f"filler/{number}")  # so that it is not evicted soon
            number, end = number + 1, time.monotonic() + _FULL_SECONDS
    return number


if __name__ == "__main__":
    main(*sys.argv[1:])
