"""The scheduler half's events, from a real server, for vLLM's classes; no engine."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import pytest
from tests.caches import ALICE, BLOCK_BYTES, BOB, config, eventually, key, keys, load, save
from tests.remote.valkey_servers import Server, name_of
from tests.server.harness import serving
from vllm.distributed import kv_events as theirs
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, init_none_hash, maybe_convert_block_hash

from kvstrata.core.types import BlockKey
from kvstrata.integration.vllm import events as events_module
from kvstrata.integration.vllm.blocks import BlockMath, GroupMath
from kvstrata.integration.vllm.events import KVEvents, kv_events
from kvstrata.integration.vllm.link import CacheLink
from kvstrata.manager.manager import KVManager
from kvstrata.observe import kv_events as ours
from kvstrata.observe.block_changes import Change
from kvstrata.server import protocol as p

TOKENS: Final = 4  # of a block; of vLLM's hashes half as many
PROMPT = keys(1, 2, 3)
SPEC: Final = {"kv_cache_spec_kind": "full_attention", "kv_cache_spec_sliding_window": None}


def number(block: BlockKey) -> Any:
    return maybe_convert_block_hash(BlockHash(block))


def request(prompt: Sequence[BlockKey] = PROMPT, **fields: Any) -> Any:
    """What the events need of one of vLLM's; its tokens are counted up."""
    hashes = [each for block in prompt for each in (key(0), block)]
    nothing: dict[str, Any] = {
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
        "prompt_embeds": None,
    }
    tokens = list(range(len(prompt) * TOKENS))
    return SimpleNamespace(**nothing | {"block_hashes": hashes, "all_token_ids": tokens} | fields)


class Half:
    """An engine's events, and the manager of its server."""

    def __init__(self, manager: KVManager, link: CacheLink) -> None:
        self.manager = manager
        self.link = link
        self.events = KVEvents(BlockMath((GroupMath(TOKENS),), TOKENS // 2, TOKENS), link, [SPEC])
        self.taken: list[Any] = []

    def is_followed(self) -> None:
        """The server has read what the link has said up to now: it answers in order."""
        pending = self.link.submit(p.GetMatch(0, b"n" * 16, b"k" * 32, "a probe"))
        assert pending is not None

        def is_answered() -> bool:
            self.link.tick()
            return pending.reply is not None

        eventually(is_answered, "no answer")

    def wait(self, count: int) -> list[Any]:
        """The next *count* events."""

        def are_there() -> bool:
            self.link.tick()
            self.taken += self.events.take()
            return len(self.taken) >= count

        eventually(are_there, f"not {count} events")
        found, self.taken = self.taken[:count], self.taken[count:]
        return found

    def shared(self, kind: Any, count: int) -> list[Any]:
        """The events of this *kind* about the tier of all nodes, up to *count* blocks; others go."""
        found: list[Any] = []
        while sum(len(event.block_hashes) for event in found) < count:
            (event,) = self.wait(1)
            if isinstance(event, kind) and event.medium == theirs.MEDIUM_STORAGE:
                assert (event.locality, event.ownership) == ("REMOTE", "remote")
                found.append(event)
        return found


@contextmanager
def half(folder: Path, **settings: Any) -> Iterator[Half]:
    hello = p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", BLOCK_BYTES)
    with serving(config(16, **settings), folder / "s") as server:
        link = CacheLink(config(4, reconnect_seconds=0.01), folder / "s", hello, None)
        with closing(link):
            link.connect(5)
            assert server.manager is not None
            yield Half(server.manager, link)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Half]:
    monkeypatch.setattr("kvstrata.integration.vllm.link._WORKERS_SECONDS", 0.0)
    with half(tmp_path) as told:
        told.events.follow(ALICE)
        told.is_followed()
        yield told


def test_what_a_request_saved_is_told_with_its_tokens(told: Half) -> None:
    lora = LoRARequest("adapter", 7, "/adapters/7")
    told.events.describe(request(lora_request=lora, cache_salt="salt"), 0, 3)
    save(told.manager, ALICE, PROMPT[:1])
    save(told.manager, ALICE, PROMPT[1:], parent=PROMPT[0])
    shared = {"block_size": TOKENS, "lora_id": 7, "lora_name": "adapter", "medium": "CPU"}
    shared |= {"group_idx": 0, **SPEC}
    assert told.wait(2) == [
        BlockStored(
            block_hashes=[number(PROMPT[0])],
            parent_block_hash=None,
            token_ids=[0, 1, 2, 3],
            extra_keys=[("adapter", "salt")],
            **shared,
        ),
        BlockStored(
            block_hashes=[number(block) for block in PROMPT[1:]],
            parent_block_hash=number(PROMPT[0]),
            token_ids=list(range(4, 12)),
            extra_keys=[("adapter",), ("adapter",)],
            **shared,
        ),
    ]


def test_of_other_blocks_only_the_hashes_are_told(told: Half) -> None:
    told.events.describe(request(), 1, 2)
    save(told.manager, ALICE, PROMPT)
    first, middle, last = told.wait(3)
    assert (first.token_ids, first.block_size, first.parent_block_hash) == ([], 0, None)
    assert (middle.token_ids, middle.block_size) == ([4, 5, 6, 7], TOKENS)
    assert (last.token_ids, last.parent_block_hash) == ([], number(PROMPT[1]))
    assert [e.block_hashes for e in (first, middle, last)] == [[number(b)] for b in PROMPT]


def test_tokens_are_kept_of_so_many_blocks(told: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_DESCRIBED_BLOCKS", 2)
    told.events.describe(request(), 0, 3)
    told.events.describe(request(), 1, 2)
    assert list(told.events._described) == [PROMPT[2], PROMPT[1]]


def test_what_leaves_and_what_a_reset_takes_is_told(told: Half) -> None:
    save(told.manager, ALICE, PROMPT)
    told.wait(1)
    save(told.manager, ALICE, keys(*range(5, 21)))
    removed, stored = told.wait(2)
    assert isinstance(removed, BlockRemoved)
    assert set(removed.block_hashes) == {number(block) for block in PROMPT}
    assert (removed.medium, removed.group_idx) == ("CPU", 0)
    assert len(stored.block_hashes) == 16
    told.manager.reset(ALICE)
    assert told.wait(1) == [AllBlocksCleared()]
    told.manager.reset(ALICE)
    save(told.manager, ALICE, PROMPT)
    assert isinstance(told.wait(1)[0], BlockStored)  # nothing was told that could be cleared


def test_an_engine_that_goes_on_in_another_namespace_tells_nothing_of_the_first(told: Half) -> None:
    save(told.manager, ALICE, PROMPT)
    told.wait(1)
    told.events.follow(BOB)
    save(told.manager, ALICE, keys(9))
    save(told.manager, BOB, PROMPT[:1])
    cleared, stored = told.wait(2)
    assert cleared == AllBlocksCleared()
    assert stored.block_hashes == [number(PROMPT[0])]
    assert not told.taken


def test_without_a_server_all_that_was_told_is_void(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.integration.vllm.link._WORKERS_SECONDS", 0.0)
    hello = p.Hello(0, p.PROTOCOL_VERSION, "engine", "e", BLOCK_BYTES)
    path, settings = tmp_path / "s", config(16, tmp_path / "disk")
    link = CacheLink(config(4, reconnect_seconds=0.01), path, hello, None)
    with closing(link):
        with serving(settings, path) as server:
            link.connect(5)
            assert server.manager is not None
            told = Half(server.manager, link)
            told.events.follow(ALICE)
            save(server.manager, ALICE, PROMPT)
            told.wait(1)
        assert AllBlocksCleared() in told.wait(1) + told.taken
        told.taken.clear()
        assert told.events.take() == []
        with serving(settings, path):  # the disk has what host memory had
            stored = told.wait(1).pop()
        assert (stored.medium, stored.locality, stored.ownership) == ("STORAGE", "LOCAL", "disk")
        assert set(stored.block_hashes) == {number(block) for block in PROMPT}


def test_what_goes_to_the_tier_of_all_nodes_and_is_known_to_have_left_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.integration.vllm.link._WORKERS_SECONDS", 0.0)
    redis = Server(tmp_path)
    url = f"valkey://127.0.0.1:{redis.port}?prefix=told&missing_seconds=0"
    try:
        with half(tmp_path, tiers=f"host:32KiB | {url}", recompute="never") as told:
            told.events.follow(ALICE)
            told.is_followed()
            told.events.describe(request(), 0, 3)
            save(told.manager, ALICE, PROMPT)
            stored = told.shared(BlockStored, 3)
            assert [token for event in stored for token in event.token_ids] == list(range(12))
            save(told.manager, ALICE, keys(*range(5, 13)))  # all that host memory holds
            told.shared(BlockStored, 8)
            redis.ask("SETRANGE", name_of(ALICE + PROMPT[1], "told"), 500, b"another byte")
            assert len(load(told.manager, ALICE, PROMPT)) == 1
            (removed,) = told.shared(BlockRemoved, 1)
            assert removed.block_hashes == [number(PROMPT[1])]
    finally:
        redis.kill()


def test_news_of_a_save_keep_the_engine_stepping_for_a_moment(
    told: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_busy() -> bool:
        return told.events.busy

    assert not is_busy()
    told.events.expect([PROMPT[2]])
    assert is_busy()
    save(told.manager, ALICE, PROMPT)
    told.wait(1)
    assert not is_busy()
    monkeypatch.setattr(events_module, "_PATIENCE_SECONDS", 0.0)
    told.events.expect([key(7)])
    assert not is_busy()


def test_events_are_off_unless_vllm_publishes_some(
    told: Half, caplog: pytest.LogCaptureFixture
) -> None:
    def of(events: Any, algorithm: str) -> KVEvents | None:
        cache = SimpleNamespace(prefix_caching_hash_algo=algorithm)
        vllm_config: Any = SimpleNamespace(kv_events_config=events, cache_config=cache)
        group = SimpleNamespace(kv_cache_spec=None)
        plan: Any = SimpleNamespace(kv_cache_groups=[group])
        return kv_events(vllm_config, plan, BlockMath((GroupMath(4),), 2, 4), told.link)

    wanted = SimpleNamespace(enable_kv_cache_events=True)
    assert of(None, "sha256") is None
    assert of(SimpleNamespace(enable_kv_cache_events=False), "sha256") is None
    assert not caplog.records
    assert of(wanted, "xxhash") is None
    assert "use --prefix-caching-hash-algo sha256" in caplog.text


@pytest.mark.parametrize("name", ["BlockStored", "BlockRemoved", "AllBlocksCleared"])
def test_our_messages_have_the_fields_of_vllm(name: str) -> None:
    def fields(module: Any) -> list[tuple[str, Any]]:
        return [(f.name, f.default) for f in msgspec.structs.fields(getattr(module, name))]

    assert fields(ours) == fields(theirs)


@pytest.mark.parametrize("as_numbers", [True, False])
def test_vllm_reads_what_we_encode(as_numbers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(as_numbers)))
    init_none_hash(sha256)
    changes = [
        Change("stored", ALICE, "host", b"".join(PROMPT[1:]), PROMPT[0]),
        Change("removed", ALICE, "disk", PROMPT[0]),
        Change("cleared", ALICE),
    ]
    batch = ours.KVEventBatch(1.5, [ours.event_of(c, as_numbers=as_numbers) for c in changes])
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=theirs.KVEventBatch)
    assert read.ts == 1.5
    assert read.events == [
        BlockStored(
            block_hashes=[number(block) for block in PROMPT[1:]],
            parent_block_hash=number(PROMPT[0]),
            token_ids=[],
            block_size=0,
            lora_id=None,
            medium=theirs.MEDIUM_CPU,
            lora_name=None,
            group_idx=0,
        ),
        BlockRemoved(
            block_hashes=[number(PROMPT[0])],
            medium=theirs.MEDIUM_STORAGE,
            group_idx=0,
            locality="LOCAL",
            ownership="disk",
        ),
        AllBlocksCleared(),
    ]
    again = msgspec.msgpack.encode(theirs.KVEventBatch(ts=1.5, events=read.events))
    assert again == msgspec.msgpack.encode(batch)
