"""Clients that are told what happens to blocks, over the wire, at their own pace."""

from contextlib import closing
from pathlib import Path

from tests.caches import ALICE, BOB, PATIENCE_SECONDS, config, eventually, keys, save
from tests.mirrors import Mirror, held_by
from tests.server.harness import RawClient, engine, serving

from kvstrata.core.types import NamespaceId
from kvstrata.manager.manager import KVManager
from kvstrata.observe.block_changes import Change
from kvstrata.server import protocol as p
from kvstrata.server.client import ManagerClient, observe
from kvstrata.server.server import Server

SLOTS = 4096


def manager_of(server: Server) -> KVManager:
    assert server.manager is not None
    return server.manager


def hear(client: ManagerClient, mirror: Mirror) -> None:
    client.poll(0.0)
    for changed in client.take_changed():
        mirror.apply(unpacked(changed))


def unpacked(changed: p.Changed) -> list[Change]:
    return [
        Change(c.kind, changed.namespace, c.tier, c.keys, c.parent or None) for c in changed.changes
    ]


def hears_all(client: ManagerClient, mirror: Mirror, server: Server, whose: NamespaceId) -> None:
    def is_right() -> bool:
        hear(client, mirror)
        return mirror.held == held_by(manager_of(server), [whose])

    eventually(is_right, "the client does not hear what there is")


def test_an_engine_hears_what_there_is_and_what_happens(tmp_path: Path) -> None:
    with (
        serving(config(SLOTS), tmp_path / "s") as server,
        closing(engine(tmp_path / "s")) as client,
    ):
        manager, mirror = manager_of(server), Mirror()
        save(manager, ALICE, keys(1, 2, 3))
        client.submit(p.Follow(ALICE))
        hears_all(client, mirror, server, ALICE)
        assert len(mirror.held) == 3
        save(manager, BOB, keys(1, 2))
        for number in range(2, 7):
            save(
                manager,
                ALICE,
                [bytes([number, i % 256, i // 256]) + bytes(29) for i in range(1500)],
            )
        hears_all(client, mirror, server, ALICE)
        manager.reset(ALICE)
        hears_all(client, mirror, server, ALICE)
        assert (mirror.held, mirror.cleared) == (set(), 1)


def test_one_message_at_a_time_and_no_clock_runs_for_who_does_not_listen(tmp_path: Path) -> None:
    with serving(config(SLOTS), tmp_path / "s") as server:
        manager = manager_of(server)
        client = RawClient(tmp_path / "s")
        client.send(p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", 4096), p.Follow(ALICE), p.Ping(1))
        assert isinstance(client.receive(), p.Welcome)
        assert client.receive() == p.Number(1, 0)
        for number in range(40):
            save(manager, ALICE, [bytes([number, i]) + bytes(30) for i in range(100)])
        connections = list(server._switchboard._clients.values())
        assert [c.connection.unread_bytes for c in connections] == [0]
        told = client.receive()
        assert isinstance(told, p.Changed)
        assert sum(len(c.keys) for c in told.changes) <= 1024 * 32
        client.send(p.Ping(2))
        assert client.receive() == p.Number(2, 0)
        client.send(p.Heard())
        assert isinstance(client.receive(), p.Changed)
        client.close()


def test_another_namespace_takes_the_place_of_the_first(tmp_path: Path) -> None:
    with serving(config(16), tmp_path / "s") as server, closing(engine(tmp_path / "s")) as client:
        mirror = Mirror()
        client.submit(p.Follow(ALICE))
        save(manager_of(server), ALICE, keys(1, 2))
        client.submit(p.Follow(BOB))
        client.ping()
        hear(client, Mirror())
        save(manager_of(server), ALICE, keys(3))
        save(manager_of(server), BOB, keys(1))
        hears_all(client, mirror, server, BOB)
        assert len(manager_of(server).feed._followers) == 1


def test_who_has_gone_follows_no_more(tmp_path: Path) -> None:
    with serving(config(16), tmp_path / "s") as server:
        client = engine(tmp_path / "s")
        client.submit(p.Follow(ALICE))
        client.ping()
        assert len(manager_of(server).feed._followers) == 1
        client.close()
        eventually(lambda: not manager_of(server).feed._followers, "somebody follows still")
        save(manager_of(server), ALICE, keys(1))


def test_who_is_no_engine_is_hung_up_on(tmp_path: Path) -> None:
    with serving(config(16), tmp_path / "s"):
        observer = observe(tmp_path / "s", timeout_seconds=PATIENCE_SECONDS)
        observer.submit(p.Follow(ALICE))
        eventually(lambda: observer.is_hung_up, "an observer follows")
        observer.close()


def test_heard_means_nothing_to_who_follows_nothing(tmp_path: Path) -> None:
    with serving(config(16), tmp_path / "s"), closing(engine(tmp_path / "s")) as client:
        client.submit(p.Heard())
        client.ping()
