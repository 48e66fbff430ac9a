"""A remote tier by its settings: what a server, its operator and several engines see of it."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tests.caches import (
    ALICE,
    BLOCK_BYTES,
    PATIENCE_SECONDS,
    contents,
    eventually,
    keys,
    load,
    save,
)
from tests.cli.processes import kvstrata
from tests.remote.proxy import Fault, Proxy
from tests.remote.valkey_servers import Server
from tests.server.harness import engine, serving, worker

from kvstrata.core.config import Config
from kvstrata.core.errors import ConfigError
from kvstrata.core.load import load_config
from kvstrata.manager.manager import KVManager

PROMPT = keys(*[0] * 8)
PASSWORD = "open-sesame"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"), "--requirepass", PASSWORD)
    yield server
    server.kill()


@pytest.fixture
def slow(redis: Server) -> Iterator[Proxy]:
    """A link over which a question takes far longer than a request waits."""
    proxy = Proxy(redis.address)
    proxy.bytes_per_second = 800
    yield proxy
    proxy.close()


@pytest.fixture
def url(redis: Server, tmp_path: Path) -> str:
    """Of a tier with keys of its own."""
    return f"valkey://:{PASSWORD}@127.0.0.1:{redis.port}?prefix={tmp_path.name}"


def config(url: str, **changes: object) -> Config:
    settings = {"tiers": f"host:256KiB | {url}", "prefault": False, "recompute": "never"}
    return load_config(settings | changes, environ={})


def commands(redis: Server, name: str) -> int:
    """How many of one kind the server has been sent."""
    counted = redis.info("commandstats", password=PASSWORD)
    return int(counted.get(f"cmdstat_{name}", {"calls": 0})["calls"])


def written(manager: KVManager) -> None:
    assert manager._lower["remote"].drain(PATIENCE_SECONDS)


@pytest.mark.parametrize("form", ["", "&compress=true"])
def test_blocks_come_back_in_another_life_of_the_cache(url: str, form: str) -> None:
    one = KVManager(config(url + form), block_bytes=BLOCK_BYTES)
    save(one, ALICE, PROMPT)
    one.close()
    other = KVManager(config(url + form), block_bytes=BLOCK_BYTES)
    assert load(other, ALICE, PROMPT) == contents(ALICE, PROMPT)
    other.close()


@pytest.mark.parametrize("forms", [("", "&compress=true"), ("&compress=true", "")])
def test_nodes_that_compress_and_nodes_that_do_not_never_meet(
    url: str, forms: tuple[str, str]
) -> None:
    one, other = (KVManager(config(url + form), block_bytes=BLOCK_BYTES) for form in forms)
    save(one, ALICE, PROMPT)
    written(one)
    assert load(other, ALICE, PROMPT) == []
    save(other, ALICE, PROMPT)
    for node in (one, other):
        node.close()
    for form in forms:
        again = KVManager(config(url + form), block_bytes=BLOCK_BYTES)
        assert load(again, ALICE, PROMPT) == contents(ALICE, PROMPT)
        again.close()


def test_a_reset_leaves_other_keys_alone(redis: Server, url: str, tmp_path: Path) -> None:
    node = KVManager(config(url), block_bytes=BLOCK_BYTES)
    save(node, ALICE, PROMPT)
    written(node)
    client = redis.client(password=PASSWORD)
    for other in (
        f"{tmp_path.name}:{ALICE.hex()}:config",
        f"{tmp_path.name}:{ALICE.hex()}:{'x' * 64}",
    ):
        client.set(other, "keep")
    node.reset(ALICE)
    assert len(list(client.scan_iter(f"{tmp_path.name}:*"))) == 2
    node.close()


def test_a_block_that_was_missing_is_found_when_another_node_has_written_it(url: str) -> None:
    """Not at once: what was missing is not asked for again for a moment."""
    one = KVManager(config(url), block_bytes=BLOCK_BYTES)
    other = KVManager(config(url + "&missing_seconds=0.2"), block_bytes=BLOCK_BYTES)
    assert load(other, ALICE, PROMPT) == []
    save(one, ALICE, PROMPT)
    written(one)
    eventually(lambda: load(other, ALICE, PROMPT) == contents(ALICE, PROMPT), "it is not found")
    one.close()
    other.close()


def test_several_engines_that_ask_for_the_same_cause_one_question_and_one_read(
    redis: Server, url: str, tmp_path: Path
) -> None:
    other = KVManager(config(url), block_bytes=BLOCK_BYTES)
    save(other, ALICE, PROMPT)
    other.close()
    path = tmp_path / "s"
    with serving(config(url + "&missing_seconds=30"), path):
        engines = [engine(path, f"e{n}") for n in range(6)]
        workers = [worker(path, f"e{n}") for n in range(6)]
        before = {name: commands(redis, name) for name in ("exists", "get")}

        def ask(number: int) -> int:
            task = engines[number].get_match(ALICE, PROMPT)
            return len(engines[number].wait([task.task_id], PATIENCE_SECONDS)[task.task_id].slots)

        def ask_in_vain(number: int) -> int:
            task = engines[number].get_match(ALICE, keys(5, 5, 5))
            settled = engines[number].wait([task.task_id], PATIENCE_SECONDS) if task.task_id else {}
            return sum(len(status.slots) for status in settled.values())

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, range(6))) == [len(PROMPT)] * 6
            assert commands(redis, "get") - before["get"] == len(PROMPT)
            before["exists"] = commands(redis, "exists")
            for _ in range(3):
                assert list(pool.map(ask_in_vain, range(6))) == [0] * 6
        assert commands(redis, "exists") - before["exists"] == 3
        for client in (*engines, *workers):
            client.close()


def test_a_long_prompt_is_looked_up_with_few_questions(redis: Server, url: str) -> None:
    asked = keys(*[0] * 1000)
    node = KVManager(config(url), block_bytes=BLOCK_BYTES)
    before = commands(redis, "exists")
    assert load(node, ALICE, asked) == []
    assert commands(redis, "exists") - before < 100
    node.close()


def test_the_stats_of_a_server_name_the_cause_of_its_faults(redis: Server, tmp_path: Path) -> None:
    path = tmp_path / "s"
    wrong = f"valkey://:not-{PASSWORD}@127.0.0.1:{redis.port}"
    with serving(config(wrong), path, block_bytes=BLOCK_BYTES):
        client, copier = engine(path), worker(path)
        eventually(lambda: client.workers() == 1, "the worker is not counted")
        for _ in range(3):
            client.get_match(ALICE, PROMPT)
            time.sleep(0.05)  # for the search to end

        def shown() -> str:
            return kvstrata("stats", "--socket", str(path)).stdout

        eventually(lambda: "faults of the tier that nodes share: credentials" in shown(), shown())
        assert PASSWORD not in shown()
        assert (
            'cause="credentials"' in kvstrata("stats", "--socket", str(path), "--prometheus").stdout
        )
        client.close()
        copier.close()


def test_the_doctor_tries_a_remote_tier(redis: Server, url: str, tmp_path: Path) -> None:
    def doctor(address: str) -> str:
        file = tmp_path / "kvstrata.yaml"
        file.write_text(f"tiers: host:8MiB | {address}\n")
        return kvstrata("doctor", "--config", str(file), "--json").stdout

    assert "a block came back unchanged through valkey://***@127.0.0.1" in doctor(url)
    before = redis.client(password=PASSWORD).dbsize()
    assert redis.client(password=PASSWORD).dbsize() == before  # it has removed its own
    refused = doctor(url.replace(PASSWORD, "guess-me"))
    assert "cannot be used now (credentials)" in refused
    assert "guess-me" not in refused
    assert "cannot be used now (unreachable)" in doctor("valkey://127.0.0.1:1")
    assert "cannot be used now (name)" in doctor("valkey://no-such-host.invalid")


def test_a_password_may_be_in_a_file(redis: Server, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    address = f"valkey://127.0.0.1:{redis.port}?prefix=f&password_file={file}&database=1"
    node = KVManager(config(address), block_bytes=BLOCK_BYTES)
    save(node, ALICE, PROMPT)
    written(node)
    assert redis.client(password=PASSWORD, db=1).dbsize() == len(PROMPT)
    node.close()
    file.unlink()
    with pytest.raises(ConfigError, match=r"password file .* cannot be read"):
        KVManager(config(address), block_bytes=BLOCK_BYTES)


@pytest.mark.parametrize(
    "address",
    [
        "valkey://127.0.0.1?cluster=true&sentinel=a",
        "valkey://127.0.0.1:port",
        "unix:///nowhere?cluster=true",
        "s3://",
        "mooncake://",
        "mooncake://host:0",
        "valkey://a?tls_ca_file=/x",
    ],
)
def test_an_address_that_cannot_work_is_refused_at_the_start(address: str) -> None:
    with pytest.raises(ConfigError):
        KVManager(config(address), block_bytes=BLOCK_BYTES)


def ask_as_an_engine(manager: KVManager, request: str) -> int:
    """How many blocks a request gets that waits ``remote_lookup_seconds`` for the shared tier."""
    task = manager.get_match(ALICE, PROMPT, request=request)
    assert task.task_id
    settled = manager.wait([task.task_id], Config().remote_lookup_seconds)[task.task_id]
    manager.cancel([task.task_id])
    return len(settled.slots)


def has_come_to(count: Callable[[], int], expected: int) -> bool:
    return count() == expected


def test_a_tier_that_says_too_late_what_it_has_is_counted_and_named(
    url: str, redis: Server, slow: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    writer = KVManager(config(url), block_bytes=BLOCK_BYTES)
    save(writer, ALICE, PROMPT)
    writer.close()
    far = url.replace(str(redis.port), str(slow.port))
    reader = KVManager(config(far + "&timeout_seconds=10"), block_bytes=BLOCK_BYTES)

    def unanswered() -> int:
        return reader.counters.snapshot()["kvstrata_unanswered_lookups_total"]

    with slow.failing(Fault.SLOW, bytes_per_second=800):
        for lookup in range(1, 4):
            assert ask_as_an_engine(reader, f"late-{lookup}") == 0
            eventually(partial(has_come_to, unanswered, lookup), "a late answer is not counted")
    counted = reader.counters.snapshot()
    assert counted["kvstrata_declined_blocks_total{reason=unanswered}"] == 3 * len(PROMPT)
    (begun, late) = reader.explain("late-2")
    assert (begun.reason, late.reason) == ("all", "unanswered")
    assert (late.asked_blocks, late.taken_blocks) == (len(PROMPT), 0)
    (warned,) = [line for line in caplog.messages if "remote_lookup_seconds" in line]
    assert "raise remote_lookup_seconds" in warned
    assert load(reader, ALICE, PROMPT) == contents(ALICE, PROMPT)
    assert unanswered() == 3
    reader.close()
