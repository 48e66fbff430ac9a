"""``kill -9`` of everything, and a new engine on the same disk directory."""

import os
import random
import signal
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.vllm.engine import (
    MAX_TOKENS,
    Act,
    Answer,
    Ask,
    Engine,
    embedded_report,
    transfer_config,
    wait_for_disk,
    wait_until,
)
from tests.vllm.oracle import Oracle, ReuseModel, random_prompt, random_prompts

from kvstrata.bench.processes import is_alive
from kvstrata.manager.report import CacheReport
from kvstrata.server.sockets import embedded_socket

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK = 64


class Killed(Exception):
    """Thrown by the hook that has killed the engine."""


@dataclass
class Again:
    """A request of the first life asked again in the second."""

    ask: Ask
    answer: Answer
    reusable: int  # tokens, by the model


@dataclass
class Story:
    """What was seen in two lives of an engine on one disk directory."""

    again: list[Again]
    counters: dict[str, float]  # of the second engine
    report: CacheReport  # of the second server
    first_socket_is_left: bool
    second_socket: Path
    second_server: int  # its pid; the engine was killed, the server was not
    shared_memory: list[str]  # what the second server had open or mapped in /dev/shm


def _engine(model: Path, folder: Path, name: str) -> Engine:
    transfer = transfer_config(name, TOKENS_PER_BLOCK, tiers=f"host:64MiB | disk:{folder}/kv:1GiB")
    return Engine(model, folder / f"{name}.log", transfer)


@pytest.fixture(scope="module")
def story(tiny_llama: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("restart")
    names = [f"life-{i}-{os.getpid()}-{random.randrange(1 << 30)}" for i in (1, 2)]
    model = ReuseModel(TOKENS_PER_BLOCK)
    rng = random.Random(9)
    asks = [
        Ask(f"life-{i}", prompt, 8, at_step=2 * i)
        for i, prompt in enumerate(random_prompts(rng, 16, most_tokens=MAX_TOKENS - 8))
    ]
    with _engine(tiny_llama, folder, names[0]) as engine:
        answers = engine.run(asks)
        oracle.check(asks, answers)
        for ask in asks:
            model.answered(ask.prompt, answers[ask.id])
        engine.reset_prefix_cache()
        wait_for_disk(names[0])
        _kill_in_the_middle(engine, rng)
    left = embedded_socket(names[0])
    assert left.exists()
    with _engine(tiny_llama, folder, names[1]) as engine:
        again = []
        for ask in asks:
            engine.reset_prefix_cache()
            answer = engine.run([ask])[ask.id]
            again.append(Again(ask, answer, model.reusable(ask.prompt)))
        server = engine.server_pid()
        assert server is not None
        return Story(
            again,
            engine.counters(),
            embedded_report(names[1]),
            left.exists(),
            embedded_socket(names[1]),
            server,
            _shared_memory(server),
        )


def _kill_in_the_middle(engine: Engine, rng: random.Random) -> None:
    """Server and engine die while more is being saved and written to disk."""
    server = engine.server_pid()
    assert server is not None

    def kill() -> None:
        os.kill(server, signal.SIGKILL)
        engine.kill()
        raise Killed

    more = [Ask(f"more-{i}", random_prompt(rng, 600), 20, at_step=i) for i in range(10)]
    with pytest.raises(Killed):
        engine.run([*more, Act("call", "kill", at_step=12)], {"kill": kill})


def _shared_memory(pid: int) -> list[str]:
    """Names in /dev/shm that process *pid* uses."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it opens and closes files meanwhile
            links.append(os.readlink(link))
    mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [text for text in [*links, *mapped] if "/dev/shm" in text]


def test_all_that_was_on_disk_is_hit_again(story: Story, oracle: Oracle) -> None:
    assert [each.answer.cached_tokens for each in story.again] == [
        each.reusable for each in story.again
    ]
    oracle.check([e.ask for e in story.again], {e.ask.id: e.answer for e in story.again})
    if find_spec("vllm.v1.metrics.cache_hit_source"):  # before 0.32 vLLM counts no sources
        by_source = {
            tier: story.counters.get(f"vllm:prompt_tokens_cached_by_source{{{tier}}}", 0)
            for tier in ("host", "disk")
        }
        assert by_source["disk"] > 0
        assert sum(by_source.values()) == sum(each.reusable for each in story.again)
    assert story.report.counters["kvstrata_corrupt_blocks_total"] == 0


def test_the_next_start_removes_the_socket_of_a_killed_server(story: Story) -> None:
    assert not story.first_socket_is_left


def test_nothing_is_left_of_a_killed_engine(story: Story) -> None:
    wait_until(lambda: not is_alive(story.second_server), "the embedded server lives on")
    assert not story.second_socket.exists()
    assert story.shared_memory == []
    assert not [entry for entry in Path("/dev/shm").iterdir() if "kvstrata" in entry.name]
