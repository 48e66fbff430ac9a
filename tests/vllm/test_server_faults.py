"""The cache server dies or freezes under load: requests complete, and hits come back."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.vllm.engine import (
    MAX_TOKENS,
    START_SECONDS,
    Act,
    Answer,
    Ask,
    CacheServer,
    Engine,
    report_at_rest,
    server_answers,
    wait_for_disk,
    wait_until,
    wait_until_written,
)
from tests.vllm.oracle import Oracle, random_prompt

from kvstrata.bench.processes import is_alive
from kvstrata.core.load import load_config
from kvstrata.manager.manager import KVManager
from kvstrata.server.client import observe
from kvstrata.server.sockets import runtime_directory

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK: Final = 64
TIMEOUTS: Final[dict[str, Any]] = {
    "lookup_timeout_seconds": 5,  # on a busy machine the answer of a running server may be late
    "load_timeout_seconds": 2,
    "save_timeout_seconds": 2,
    "reconnect_seconds": 0.2,
}
WAITS_SECONDS: Final = 5 + 2 + 2  # what the cache may cost a request at most
COMPUTE_SECONDS: Final = 40.0  # for a whole run, on a machine that others use too

Prompt = tuple[int, ...]


class Bench:
    """An engine whose cache holds ``old`` prompts, and new prompts in plenty."""

    def __init__(self, engine: Engine, oracle: Oracle, seed: int) -> None:
        self.engine = engine
        self.oracle = oracle
        self.rng = random.Random(seed)
        self.old = [random_prompt(self.rng, self.rng.randrange(200, 500)) for _ in range(10)]
        self._runs = 0

    def warm(self) -> None:
        """Have the old prompts in the cache, and only there."""
        self.run(self.old)
        self.engine.reset_prefix_cache()

    def run(self, prompts: list[Prompt], *acts: Act, **hooks: Any) -> dict[str, Answer]:
        """All of *prompts*, arriving one after the other; each must come out right and in time."""
        self._runs += 1
        asks = [
            Ask(f"run-{self._runs}-{i}", prompt, 12, at_step=2 * i)
            for i, prompt in enumerate(prompts)
        ]
        answers = self.engine.run([*asks, *acts], hooks)
        self.oracle.check(asks, answers)
        slowest = max(answer.seconds for answer in answers.values())
        assert slowest < WAITS_SECONDS + COMPUTE_SECONDS
        return answers

    def fresh(self, tokens: int = 300) -> Prompt:
        return random_prompt(self.rng, tokens)

    def mixed(self) -> list[Prompt]:
        """Old prompts, each followed by a new one: loads and saves at the same time."""
        return [prompt for old in self.old for prompt in (old, self.fresh())]

    def hits_of(self, prompt: Prompt) -> int:
        self.engine.reset_prefix_cache()
        (answer,) = self.run([prompt]).values()
        return answer.cached_tokens

    def wait_for_hits(self) -> None:
        """Until what is computed now is found again."""
        prompt = self.fresh(130)
        wait_until(lambda: self.hits_of(prompt) == 128, "the cache does not come back")

    def external_hits(self) -> float:
        return self.engine.counters().get("vllm:external_prefix_cache_hits", 0)


def _whole_blocks(prompt: Prompt) -> int:
    return len(prompt) // TOKENS_PER_BLOCK * TOKENS_PER_BLOCK


# -- embedded, recompute -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"faults-{os.getpid()}-{random.randrange(1 << 30)}"


@pytest.fixture(scope="module")
def embedded(
    name: str, tiny_llama: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("embedded")
    transfer = {
        "kv_role": "kv_both",
        "engine_id": name,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": f"host:64MiB | disk:{folder}/kv:1GiB",
            "recompute": "never",
            **TIMEOUTS,
        },
    }
    with Engine(tiny_llama, folder / "vllm.log", transfer, is_split=True) as engine:
        bench = Bench(engine, oracle, seed=1)
        bench.warm()
        yield bench


@pytest.mark.parametrize("step", [3, 9, 16])
def test_embedded_server_killed_under_load(embedded: Bench, name: str, step: int) -> None:
    embedded.wait_for_hits()
    wait_for_disk(name)
    victim = embedded.engine.server_pid()
    assert victim is not None
    assert embedded.hits_of(embedded.old[0]) == _whole_blocks(embedded.old[0])
    kill = Act("call", "kill", at_step=step)
    embedded.engine.reset_prefix_cache()
    embedded.run(embedded.mixed(), kill, kill=lambda: os.kill(victim, signal.SIGKILL))
    embedded.wait_for_hits()
    assert embedded.engine.server_pid() not in {None, victim}
    for prompt in embedded.old:
        assert embedded.hits_of(prompt) == _whole_blocks(prompt)  # from disk


@pytest.mark.parametrize("step", [1, 12])
def test_embedded_server_stopped_under_load(embedded: Bench, name: str, step: int) -> None:
    embedded.wait_for_hits()
    victim = embedded.engine.server_pid()
    assert victim is not None
    embedded.engine.reset_prefix_cache()
    stop = Act("call", "stop", at_step=step)
    try:
        embedded.run(embedded.mixed(), stop, stop=lambda: os.kill(victim, signal.SIGSTOP))
        # While it is stopped nothing is held for it and nothing is asked of it.
        assert embedded.hits_of(embedded.fresh(MAX_TOKENS - 12)) == 0
        assert embedded.hits_of(embedded.old[0]) == 0
    finally:
        os.kill(victim, signal.SIGCONT)
    embedded.wait_for_hits()
    assert embedded.engine.server_pid() == victim
    assert embedded.hits_of(embedded.old[0]) == _whole_blocks(embedded.old[0])
    report_at_rest(name)


def test_embedded_server_stopped_and_then_killed(embedded: Bench) -> None:
    embedded.wait_for_hits()
    victim = embedded.engine.server_pid()
    assert victim is not None
    embedded.engine.reset_prefix_cache()
    embedded.run(
        embedded.mixed(),
        Act("call", "stop", at_step=4),
        Act("call", "kill", at_step=20),
        stop=lambda: os.kill(victim, signal.SIGSTOP),
        kill=lambda: os.kill(victim, signal.SIGKILL),
    )
    embedded.wait_for_hits()
    assert not is_alive(victim)


# -- attached, fail ----------------------------------------------------------------------------


class Operator:
    """Runs servers at one socket, as an operator would."""

    def __init__(self, folder: Path) -> None:
        self.socket = runtime_directory() / f"operator-{os.getpid()}-{random.randrange(1 << 30)}"
        self._log = folder / "server.log"
        self.server: CacheServer | None = None

    def start(self, tiers: str = "host:64MiB") -> CacheServer:
        self.stop()
        self.server = CacheServer(load_config({"tiers": tiers}), self.socket, self._log)
        wait_until(
            lambda: server_answers(self.socket), "the server does not answer", seconds=START_SECONDS
        )
        return self.server

    def stop(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server = None


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    operator = Operator(tmp_path_factory.mktemp("operator"))
    yield operator
    operator.stop()
    operator.socket.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def attached(
    operator: Operator, tiny_llama: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """Started when there is no server; under vLLM's own policy a failed load ends its request."""
    transfer = {
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "server": "attached",
            "socket": str(operator.socket),
            "start_timeout_seconds": 1,
            **TIMEOUTS,
        },
    }
    log = tmp_path_factory.mktemp("attached") / "vllm.log"
    with Engine(tiny_llama, log, transfer, is_split=True) as engine:
        bench = Bench(engine, oracle, seed=2)
        assert bench.hits_of(bench.old[0]) == 0
        assert bench.hits_of(bench.old[0]) == 0
        assert bench.external_hits() == 0
        yield bench


def test_attached_server_appears_dies_and_appears_again(
    attached: Bench, operator: Operator
) -> None:
    operator.stop()
    attached.warm()
    operator.start()
    attached.wait_for_hits()
    attached.warm()
    operator.stop()
    attached.run(attached.mixed())
    operator.start()
    attached.wait_for_hits()


@pytest.mark.parametrize("step", [3, 16])
def test_attached_server_killed_under_load(attached: Bench, operator: Operator, step: int) -> None:
    operator.start()
    attached.wait_for_hits()
    attached.warm()
    kill = Act("call", "kill", at_step=step)
    attached.run(attached.mixed(), kill, kill=operator.stop)
    operator.start()
    attached.wait_for_hits()


def test_attached_server_replaced_under_load(attached: Bench, operator: Operator) -> None:
    """A new server at once: what the old one had promised is not looked for in the new one."""
    operator.start()
    attached.wait_for_hits()
    attached.warm()
    replace = Act("call", "replace", at_step=5)
    attached.run(attached.mixed(), replace, replace=operator.start)
    attached.wait_for_hits()


def test_attached_server_stopped_under_load(attached: Bench, operator: Operator) -> None:
    server = operator.start()
    attached.wait_for_hits()
    attached.warm()
    stop = Act("call", "stop", at_step=3)
    try:
        attached.run(attached.mixed(), stop, stop=lambda: os.kill(server.pid, signal.SIGSTOP))
        assert attached.hits_of(attached.old[0]) == 0
    finally:
        os.kill(server.pid, signal.SIGCONT)
    attached.wait_for_hits()
    assert attached.hits_of(attached.old[0]) == _whole_blocks(attached.old[0])


def test_first_prompt_after_a_restart_is_loaded(
    attached: Bench, operator: Operator, tmp_path: Path
) -> None:
    """The engine is idle meanwhile: scheduler and worker come back without a step."""
    tiers = f"host:64MiB | disk:{tmp_path}/kv:256MiB"
    operator.start(tiers)
    attached.wait_for_hits()
    attached.warm()
    wait_until_written(operator.socket)
    server = operator.start(tiers)

    def is_whole() -> bool:
        with contextlib.closing(observe(operator.socket)) as client:
            report = client.stats()  # None until one of the engine's halves has come
        return report is not None and [each["workers"] for each in report.engines] == [[0]]

    wait_until(is_whole, "the idle engine does not come back")
    time.sleep(2)  # the welcome, on its way to another process, which has no core for itself
    found = attached.hits_of(attached.old[0])
    told = {name: value for name, value in server.report().counters.items() if value}
    assert found == _whole_blocks(attached.old[0]), told


# -- without an engine -------------------------------------------------------------------------


def test_task_ids_of_two_servers_differ() -> None:
    """A worker's late news of a dead server's task must not pass for news of the next server's."""
    config = load_config({"tiers": "host:1MiB", "prefault": False})
    ids = set()
    for _ in range(2):
        manager = KVManager(config, block_bytes=4096)
        ids.add(manager.put_match(bytes(16), [bytes(32)]).task_id)
        manager.close()
    assert len(ids) == 2
