"""What a lookup costs whose prefix has to end at recurrent states.

    python -m bench.states

Best of many, in microseconds, of ``get_match`` in this process: everything is in host memory. *plain* asks
for no states; *near the end* finds them behind one of the last blocks, *none* behind no block.
"""

import os
import time

from kvstrata.core.config import Config
from kvstrata.core.keys import KeyArray, as_key_array, state_keys
from kvstrata.core.types import BlockKey, NamespaceId
from kvstrata.manager.manager import KVManager

NAMESPACE: NamespaceId = b"states".ljust(16, b".")
BLOCK_BYTES = 4096
GROUPS = 3
TURNS = 100


def main() -> None:
    print("| blocks | plain | near the end | none |")
    print("|---:|---:|---:|---:|")
    for blocks in (100, 1000, 8000):
        manager = KVManager(
            Config.model_validate({"tiers": "host:64MiB", "prefault": False}),
            block_bytes=BLOCK_BYTES,
        )
        keys = as_key_array([os.urandom(32) for _ in range(blocks)])
        save(manager, keys, None)
        plain, none = best(manager, keys, 0), best(manager, keys, GROUPS)
        last = keys[-3].tobytes()
        for group in range(GROUPS):
            save(manager, state_keys(keys[-3:-2], group), last)
        near = best(manager, keys, GROUPS)
        print(f"| {blocks} | {plain} | {near} | {none} |")
        manager.close()


def save(manager: KVManager, keys: KeyArray, parent: BlockKey | None) -> None:
    task = manager.put_match(NAMESPACE, keys, parent=parent)
    manager.launch([task.task_id])
    manager.complete([task.task_id])


def best(manager: KVManager, keys: KeyArray, states: int) -> int:
    found = 1.0
    for _ in range(TURNS):
        began_at = time.perf_counter()
        status = manager.get_match(NAMESPACE, keys, states=states)
        found = min(found, time.perf_counter() - began_at)
        manager.cancel([status.task_id])
    return round(found * 1e6)


if __name__ == "__main__":
    main()
