"""An engine's two halves without vLLM: `python -m tests.deploy.engine_program SOCKET save|load`.

Saves blocks whose bytes are their number, or loads them and says what it has found.
"""

import sys
import threading
from contextlib import closing
from pathlib import Path

from tests.cli.traffic import BLOCK_BYTES, NAMESPACE, prompt

from kvstrata.server import protocol as p
from kvstrata.server.attach import Attachment, Patience
from kvstrata.server.client import ManagerClient
from kvstrata.storage.mapping import HostMapping

BLOCKS = 3
PATIENCE_SECONDS = 20.0


def main(path: Path, what: str) -> None:
    mapped: list[HostMapping] = []
    is_mapped = threading.Event()

    def on_mapped(mapping: HostMapping | None) -> None:
        if mapping is not None:
            mapped.append(mapping)
            is_mapped.set()

    hello = p.Hello(0, p.PROTOCOL_VERSION, "engine", what, BLOCK_BYTES)
    with closing(ManagerClient(path, hello)) as client:
        client.wait_welcome(PATIENCE_SECONDS)
        worker = Attachment(
            path,
            p.Hello(0, p.PROTOCOL_VERSION, "worker", what, BLOCK_BYTES),
            on_mapped,
            patience=Patience(PATIENCE_SECONDS),
            prefault=False,
        )
        with closing(worker):
            assert is_mapped.wait(PATIENCE_SECONDS)
            client.register_namespace(NAMESPACE, {"model": "tiny", "engine": "test 1"})
            while client.workers() == 0:
                client.ping()
            done = save(client, mapped[0]) if what == "save" else load(client, mapped[0])
            sys.stdout.write(f"{done}\n")


def save(client: ManagerClient, memory: HostMapping) -> list[int]:
    task = client.put_match(NAMESPACE, prompt("p", BLOCKS))
    client.launch([task.task_id])
    for slot, number in zip(task.slots, task.missing, strict=True):
        memory.data[slot] = number + 1
    client.complete([task.task_id])
    client.ping()
    return [number + 1 for number in task.missing]


def load(client: ManagerClient, memory: HostMapping) -> list[int]:
    task = client.get_match(NAMESPACE, prompt("p", BLOCKS))
    task = client.wait([task.task_id], PATIENCE_SECONDS)[task.task_id]
    client.launch([task.task_id])
    found = [int(value) for slot in task.slots for value in set(memory.data[slot])]
    client.complete([task.task_id])
    client.ping()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
