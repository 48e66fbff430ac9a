"""KVStrata beside another connector in vLLM's MultiConnector, on a real engine."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from tests.vllm.engine import (
    Act,
    Ask,
    CacheServer,
    Engine,
    embedded_report,
    wait_for_disk,
    wait_until,
)
from tests.vllm.oracle import Oracle, random_prompt, random_prompts
from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored, KVEventBatch

from kvstrata.core.load import load_config

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK = 64


@dataclass
class Subject:
    engine: Engine
    name: str
    events: str  # address

    def settle(self) -> None:
        self.engine.reset_prefix_cache()
        wait_for_disk(self.name)

    def exposed(self) -> dict[str, float]:
        """Samples of vLLM's metrics, with the value of their last label."""
        return {
            ".".join((sample.name, *[v for k, v in sample.labels.items() if k in _OWN_LABELS])): (
                sample.value
            )
            for family in text_string_to_metric_families(self.engine.exposition())
            for sample in family.samples
        }


_OWN_LABELS = ("tier", "source", "server", "reason")


def ours(**extra: Any) -> dict[str, Any]:
    """A child: KVStrata, patient on a busy machine."""
    patience = {f"{what}_timeout_seconds": 30 for what in ("lookup", "load", "save")}
    return {
        "kv_connector": "KVStrataConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**patience, "tokens_per_block": TOKENS_PER_BLOCK, **extra},
    }


def embedded(folder: Path) -> dict[str, Any]:
    return ours(tiers=f"host:4MiB | disk:{folder / 'disk'}:1GiB", recompute="never")


def multi(name: str, *children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "engine_id": name,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }


@pytest.fixture(scope="module")
def subject(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """First a connector that answers only for whole prompts and knows one group, then ours.

    vLLM's example connector saves what one step computes: whole prompts must fit into one.
    """
    folder = tmp_path_factory.mktemp("multi")
    name = f"{folder.name}-{random.randrange(1 << 30)}"
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
    }
    address = f"ipc://{folder}/events"
    settings = {
        "kv_events_config": {"enable_kv_cache_events": True, "endpoint": address, "topic": "kv"},
        "max_num_batched_tokens": 2048,
    }
    transfer = multi(name, other, embedded(folder))
    with Engine(tiny_llama, folder / "vllm.log", transfer, settings, is_split=True) as engine:
        yield Subject(engine, name, address)


def test_two_of_ours_load_and_save_side_by_side(
    tiny_llama: Path, tmp_path: Path, oracle: Oracle
) -> None:
    """One is attached to a server with little room, so that the other has what it has forgotten."""
    name = f"two-{random.randrange(1 << 30)}"
    config = load_config({"tiers": "host:2MiB"})
    attached = ours(server="attached", socket=str(tmp_path / "s"))
    transfer = multi(name, attached, embedded(tmp_path))
    rng = random.Random(7)
    prompts = random_prompts(rng, 24, most_tokens=700, documents=3)
    prompts += rng.sample(prompts, 8)
    asks = [
        Ask(f"all-{i}", p, rng.randrange(1, 20), at_step=rng.randrange(80))
        for i, p in enumerate(prompts)
    ]
    aborts = {ask.id: ask.at_step + rng.randrange(20) for ask in rng.sample(asks, 4)}
    acts = [Act("abort", id, at_step) for id, at_step in aborts.items()]
    acts += [Act("reset", at_step=rng.randrange(80)) for _ in range(5)]
    with (
        CacheServer(config, tmp_path / "s", tmp_path / "server.log") as server,
        Engine(tiny_llama, tmp_path / "vllm.log", transfer) as engine,
    ):
        answers = engine.run([*asks, *acts])
        oracle.check(asks, answers, aborted=aborts)
        engine.reset_prefix_cache()
        again = [Ask(f"again-{ask.id}", ask.prompt, ask.new_tokens) for ask in asks[:12]]
        oracle.check(again, engine.run(again))
        engine.reset_prefix_cache()
        engine.ask(random_prompt(rng, 5))
        reports = [server.report(), embedded_report(name)]
        exposed = Subject(engine, name, "").exposed()
    for report in reports:
        assert report.counters["kvstrata_loaded_blocks_total"] > 0
        assert report.counters["kvstrata_saved_blocks_total"] > 0
        assert (report.running_gets, report.running_puts, report.leased_blocks) == (0, 0, 0)
    # The attached server is scraped itself; here it only counts as connected.
    assert exposed["kvstrata_saved_blocks_total"] > 0
    assert (
        exposed["kvstrata_saved_blocks_total"] <= reports[1].counters["kvstrata_saved_blocks_total"]
    )
    assert exposed["kvstrata_connected.embedded"] == 1
    assert exposed[f"kvstrata_connected.{tmp_path / 's'}"] == 1


def test_what_the_other_does_not_have_comes_from_our_tiers(
    subject: Subject, oracle: Oracle
) -> None:
    rng = random.Random(8)
    prompt = random_prompt(rng, 8 * TOKENS_PER_BLOCK)
    for i in range(3):  # the other one knows none of these: it names whole prompts
        subject.settle()
        before = subject.engine.counters()
        ask = Ask(f"part-{i}", (*prompt, *random_prompt(rng, 40)), 4)
        answer = subject.engine.run([ask])
        oracle.check([ask], answer)
        assert answer[ask.id].cached_tokens == (8 * TOKENS_PER_BLOCK if i else 0)
        after = subject.engine.counters()
        by_tier = {
            tier: after.get(name := f"vllm:prompt_tokens_cached_by_source{{{tier}}}", 0)
            - before.get(name, 0)
            for tier in ("host", "disk")
        }
        assert sum(by_tier.values()) == answer[ask.id].cached_tokens
        if i == 1:  # five prompts later host memory has forgotten this one
            for _ in range(5):
                subject.engine.ask(random_prompt(rng, 8 * TOKENS_PER_BLOCK))
                subject.settle()
        if i == 2:
            assert by_tier["disk"] > 0
    assert subject.engine.log_text().count("Traceback") == 0


def test_nothing_is_held_when_all_requests_are_over(subject: Subject) -> None:
    subject.settle()
    report = embedded_report(subject.name)
    assert (report.running_gets, report.running_puts, report.leased_blocks) == (0, 0, 0)


def test_metrics_of_ours_are_in_those_of_vllm(subject: Subject) -> None:
    rng = random.Random(9)
    prompt = random_prompt(rng, 3 * TOKENS_PER_BLOCK)
    fills = [random_prompt(rng, 8 * TOKENS_PER_BLOCK) for _ in range(5)]
    # Host memory has forgotten it when it comes again; the other connector names whole prompts.
    for each in (prompt, *fills, prompt + random_prompt(rng, 40)):
        subject.engine.ask(each)
        subject.settle()

    def agree() -> bool:
        subject.engine.ask(random_prompt(rng, 5))  # a frontend takes stats in when it steps
        exposed, report = subject.exposed(), embedded_report(subject.name)
        return all(
            exposed[f"kvstrata_{name}_total"] == report.counters[f"kvstrata_{name}_total"]
            for name in ("saved_blocks", "loaded_blocks", "lookups")
        )

    wait_until(agree, "vLLM's metrics are not those of the server")
    exposed = subject.exposed()
    assert exposed["kvstrata_saved_blocks_total"] >= 3
    assert exposed["kvstrata_connected.embedded"] == 1
    assert exposed["kvstrata_loaded_bytes_total.disk"] > 0
    assert exposed["kvstrata_spared_prefill_tokens_total"] > 0
    assert exposed["kvstrata_tier_switched_off.disk"] == 0


def test_events_of_ours_are_among_those_of_vllm(subject: Subject) -> None:
    rng = random.Random(10)
    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    found: list[Any] = []
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.setsockopt_string(zmq.SUBSCRIBE, "kv")
        router.connect(subject.events)

        def heard() -> bool:
            subject.engine.ask(random_prompt(rng, 2 * TOKENS_PER_BLOCK + 3))
            while router.poll(200):
                found.extend(decoder.decode(router.recv_multipart()[2]).events)
            stored = [event for event in found if isinstance(event, BlockStored)]
            return any(e.medium == MEDIUM_CPU and e.block_size == TOKENS_PER_BLOCK for e in stored)

        wait_until(heard, "no event of ours")
