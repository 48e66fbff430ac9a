"""Real vLLM whose loads fail: slots that a lookup was promised have other owners by then."""

import mmap
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.vllm.engine import Ask, Engine, embedded_report, wait_for_worker
from tests.vllm.oracle import Oracle, random_prompt

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK = 64
SLOTS = 512  # at least: a page of generations
NEW_TOKENS = 8


@contextmanager
def slots_given_away(server: int) -> Iterator[None]:
    """All slots of the host tier have other owners every millisecond."""
    descriptors = Path(f"/proc/{server}/fd")
    tiers = [each for each in descriptors.iterdir() if _is_host_tier(each)]
    assert len({each.stat().st_ino for each in tiers}) == 1
    is_over = threading.Event()
    with tiers[0].open("r+b") as file:
        generations = np.frombuffer(mmap.mmap(file.fileno(), 8 * SLOTS), dtype="<u8")

    def give_away() -> None:
        while not is_over.wait(0.001):
            np.add(generations, 1, out=generations)

    thread = threading.Thread(target=give_away)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def failed_loads(engine_id: str) -> int:
    return embedded_report(engine_id).counters["kvstrata_failed_loads_total"]


def _is_host_tier(descriptor: Path) -> bool:
    try:
        return str(descriptor.readlink()).startswith("/memfd:kvstrata-host")
    except FileNotFoundError:  # closed meanwhile
        return False


@pytest.mark.parametrize("mode", ["auto", "blockwise", "layerwise"])
def test_what_could_not_be_loaded_is_computed_by_all_that_share_it(
    tiny_llama: Path, tmp_path: Path, oracle: Oracle, mode: str
) -> None:
    name = f"failed-{random.randrange(1 << 30)}"
    transfer = {
        "engine_id": name,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": "host:16MiB",
            "load_mode": mode,
            "recompute": "never",
            "tokens_per_block": TOKENS_PER_BLOCK,
            "lookup_timeout_seconds": 30,
            "load_timeout_seconds": 30,
            "save_timeout_seconds": 30,
        },
    }
    rng = random.Random(9)
    stem, other = random_prompt(rng, 320), random_prompt(rng, 200)
    prompts = [stem + random_prompt(rng, tokens) for tokens in (1, 40, 100)] + [other, stem]
    with Engine(tiny_llama, tmp_path / "vllm.log", transfer) as engine:
        engine.wait_ready()
        wait_for_worker(name)
        asks = [Ask(f"{word}-{i}", p, NEW_TOKENS) for i, p in enumerate(prompts) for word in "abc"]
        first, second, third = (asks[start::3] for start in range(3))
        oracle.check(first, engine.run(first))
        engine.reset_prefix_cache()
        assert failed_loads(name) == 0
        server = engine.server_pid()
        assert server is not None
        with slots_given_away(server):
            for attempt in range(20):  # a load may be done between two changes of owner
                again = [replace(ask, id=f"{ask.id}-{attempt}") for ask in second]
                oracle.check(again, engine.run(again))
                engine.reset_prefix_cache()
                if failed_loads(name) > 0:
                    break
            else:
                pytest.fail("no load has failed")
        oracle.check(third, engine.run(third))
        assert "Traceback" not in engine.log_text()
