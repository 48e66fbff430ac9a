"""A reset whose drop takes minutes, as that of millions of blocks in an object store may."""

import contextlib
from pathlib import Path

import pytest
from tests.caches import ALICE, BOB, PATIENCE_SECONDS, config, eventually, keys
from tests.gated import HeldDrops
from tests.server.harness import engine, serving, worker

from kvstrata.manager.tasks import TaskState
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient, Pending


def saved(client: ManagerClient, namespace: bytes) -> int:
    """How many blocks of *namespace* were found, and are saved if that is none."""
    found = client.get_match(namespace, keys(1))
    client.cancel([found.task_id])
    if not found.task_id:
        task = client.put_match(namespace, keys(1))
        assert task.state is TaskState.READY
        client.launch([task.task_id])
        client.complete([task.task_id])
    return found.matched_blocks


def is_answered(client: ManagerClient, asked: Pending) -> bool:
    client.poll(0.01)
    return asked.reply is not None


def test_engine_uses_the_cache_while_its_old_blocks_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drops = HeldDrops(monkeypatch)
    path = tmp_path / "s"
    with (
        serving(config(8, tmp_path / "kv"), path),
        contextlib.closing(worker(path)),
        contextlib.closing(engine(path)) as client,
    ):
        assert [saved(client, ALICE) for _ in range(2)] == [0, 1]
        reset = client.submit(p.Reset(0, ALICE))
        assert drops.begun.wait(PATIENCE_SECONDS)
        assert [saved(client, namespace) for namespace in (ALICE, BOB) * 2] == [0, 0, 1, 1]
        assert not is_answered(client, reset)
        drops.go.set()
        eventually(lambda: is_answered(client, reset), "no answer")
        assert isinstance(reset.reply, p.Number | p.Refused)  # refused if a writer came first
        assert saved(client, ALICE) == 1


def test_what_an_engine_held_that_died_during_its_reset_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drops = HeldDrops(monkeypatch)
    path = tmp_path / "s"
    with serving(config(8, tmp_path / "kv"), path) as server:
        mine, dead = worker(path), engine(path)
        assert len(dead.put_match(BOB, keys(1, 2, 3)).slots) == 3
        dead.submit(p.Reset(0, ALICE))
        assert drops.begun.wait(PATIENCE_SECONDS)
        for client in (dead, mine):
            client.close()
        manager = server.manager
        assert manager is not None
        eventually(lambda: not manager.stats().running_puts, "a dead engine keeps its slots")
        drops.go.set()
        eventually(lambda: not server.clients, "it still counts")
