"""Two nodes, each with an engine and a server of its own, that share blocks through Valkey."""

import itertools
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.remote.networks import Network
from tests.remote.nodes import cache_server, valkey
from tests.vllm.engine import Answer, Ask, Engine, report_of, wait_until, wait_until_written
from tests.vllm.oracle import Oracle, loaded_at_once, random_prompt

from kvstrata.core.errors import FaultCause

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK = 64
AWAITING = {"kvstrata_wait_seconds": 60}
LOOKUP_SECONDS = 30
LOAD_SECONDS = 10
ANSWER_SECONDS = LOOKUP_SECONDS + LOAD_SECONDS + 60  # the last to compute, on a busy machine


@dataclass
class Nodes:
    """The engine of one computes prompts, that of the other answers."""

    network: Network
    prefill: Engine
    decode: Engine
    prefill_socket: Path
    decode_socket: Path
    start_valkey: Callable[[], object]  # anew, after its end

    def settle(self) -> None:
        """Until all that the first has computed is in the engine that both share.

        vLLM's own cache can be reset once no save holds a block.
        """
        self.prefill.reset_prefix_cache()
        wait_until_written(self.prefill_socket)


@pytest.fixture(scope="module")
def nodes(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    with ExitStack() as stack:
        network = stack.enter_context(Network("prefill", "decode"))

        def start_valkey() -> str:
            return stack.enter_context(valkey(network, folder))

        tier = start_valkey()
        tier += "?missing_seconds=0.05&timeout_seconds=5"
        sockets = {
            name: stack.enter_context(
                cache_server(network, name, tier, folder / f"{name}.log", "--host-size", "64MiB")
            )
            for name in ("prefill", "decode")
        }

        def engine(name: str, role: str) -> Engine:
            extra: dict[str, Any] = {
                "server": "attached",
                "socket": str(sockets[name]),
                "tokens_per_block": TOKENS_PER_BLOCK,
                "lookup_timeout_seconds": LOOKUP_SECONDS,
                "remote_lookup_seconds": 10,
                "load_timeout_seconds": LOAD_SECONDS,
            }
            transfer = {
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            }
            # Apart: an engine that waits would take the other's threads their cores.
            core = cores[len(engines) % len(cores)]
            here = ["VLLM_HOST_IP=127.0.0.1", f"VLLM_CPU_OMP_THREADS_BIND={core}"]
            command = [*network.command(name), "env", *here]
            log = folder / f"{name}-engine.log"
            engines.append(Engine(tiny_llama, log, transfer, command=command, is_split=True))
            return stack.enter_context(engines[-1])

        engines: list[Engine] = []
        cores = sorted(os.sched_getaffinity(0))
        prefill, decode = engine("prefill", "kv_producer"), engine("decode", "kv_consumer")
        for name, one in (("prefill", prefill), ("decode", decode)):
            one.wait_ready()
            wait_until(partial(_has_worker, sockets[name]), f"{name} has no worker")
        yield Nodes(network, prefill, decode, sockets["prefill"], sockets["decode"], start_valkey)


def _has_worker(socket: Path) -> bool:
    """Nothing is saved or loaded before."""
    return [each["workers"] for each in report_of(socket).engines] == [[0]]


def _ask(engine: Engine, oracle: Oracle, ask: Ask) -> Answer:
    engine.reset_prefix_cache()
    answers = engine.run([ask])
    oracle.check([ask], answers)
    return answers[ask.id]


def test_a_prompt_computed_on_one_node_is_a_hit_on_the_other(nodes: Nodes, oracle: Oracle) -> None:
    rng = random.Random(1)
    name = "kvstrata_promoted_blocks_total{tier=remote}"
    before = report_of(nodes.decode_socket).counters[name]
    for tokens in (64, 300, 1400):
        prompt = random_prompt(rng, tokens)
        _ask(nodes.prefill, oracle, Ask(f"made-{tokens}", prompt, 1))
        nodes.settle()
        answer = _ask(nodes.decode, oracle, Ask(f"used-{tokens}", prompt, 6))
        blocks = tokens // TOKENS_PER_BLOCK
        assert answer.cached_tokens == loaded_at_once(tokens, blocks * TOKENS_PER_BLOCK)
    assert report_of(nodes.decode_socket).counters[name] - before == 1 + 4 + 21


def test_a_decode_node_that_is_asked_at_once_awaits_the_prompt(
    nodes: Nodes, oracle: Oracle
) -> None:
    prompt = random_prompt(random.Random(2), 1000)
    for engine in (nodes.prefill, nodes.decode):
        engine.reset_prefix_cache()
    made, used = Ask("prefill", prompt, 1), Ask("decode", prompt, 6, transfer=AWAITING)
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(nodes.decode.run, [used])
        nodes.prefill.run([made])
        answers = answering.result()
    oracle.check([used], answers)
    assert answers["decode"].cached_tokens == 960


def test_both_nodes_answer_while_what_they_share_stands_still(nodes: Nodes, oracle: Oracle) -> None:
    prompt = random_prompt(random.Random(3), 500)
    _ask(nodes.prefill, oracle, Ask("before", prompt, 1))
    nodes.settle()
    pid = _redis(nodes.network)
    os.kill(pid, signal.SIGSTOP)
    try:
        _answers_in_time(nodes, oracle, prompt, cause="timeout")
    finally:
        os.kill(pid, signal.SIGCONT)
    nodes.settle()
    _finds(nodes, oracle, prompt)


def test_both_nodes_answer_while_what_they_share_is_dead_and_once_it_is_back_empty(
    nodes: Nodes, oracle: Oracle
) -> None:
    lost, prompt = (random_prompt(random.Random(seed), 500) for seed in (5, 6))
    _ask(nodes.prefill, oracle, Ask("lost", lost, 1))
    nodes.settle()
    os.kill(_redis(nodes.network), signal.SIGKILL)
    _answers_in_time(nodes, oracle, lost, cause="unreachable")
    nodes.start_valkey()
    _ask(nodes.prefill, oracle, Ask("new", prompt, 1))
    nodes.settle()
    _finds(nodes, oracle, prompt)
    assert _ask(nodes.decode, oracle, Ask("gone", lost, 6)).cached_tokens == 0


def _answers_in_time(
    nodes: Nodes, oracle: Oracle, prompt: tuple[int, ...], *, cause: FaultCause
) -> None:
    """Neither engine waits for what is away, and both servers count why."""
    sockets = (nodes.prefill_socket, nodes.decode_socket)
    before = [_faults(socket, cause) for socket in sockets]
    other = random_prompt(random.Random(cause), 500)
    for engine, ask in (
        (nodes.decode, Ask(f"during-{cause}", prompt, 6)),
        (nodes.prefill, Ask(f"other-{cause}", other, 1)),
    ):
        assert _ask(engine, oracle, ask).seconds < ANSWER_SECONDS

    def is_counted() -> bool:
        return all(
            _faults(each, cause) > count for each, count in zip(sockets, before, strict=True)
        )

    wait_until(is_counted, f"no {cause} is counted")


def _faults(socket: Path, cause: FaultCause) -> int:
    return report_of(socket).counters[f"kvstrata_remote_faults_total{{cause={cause}}}"]


def _finds(nodes: Nodes, oracle: Oracle, prompt: tuple[int, ...]) -> None:
    """Sooner or later the decode node loads what the other has computed."""
    attempts = itertools.count()

    def is_found() -> bool:
        ask = Ask(f"found-{prompt[0]}-{next(attempts)}", prompt, 6)
        return _ask(nodes.decode, oracle, ask).cached_tokens == 448

    wait_until(is_found, "the tier does not heal")


def _redis(network: Network) -> int:
    found = subprocess.run(
        ["ip", "netns", "pids", network.command("hub")[-1]],
        check=True,
        capture_output=True,
        text=True,
    )
    (pid,) = map(int, found.stdout.split())
    return pid
