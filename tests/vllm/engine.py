"""A real vLLM engine in processes of its own, driven over a pipe, so that it can be killed.

The parent half (``Engine``, ``CacheServer``) is for tests; this file run as a program is the child.
One line of JSON is one command or one answer.
"""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Self

from tests.vllm.nursery import Forked, Nursery

from kvstrata.core.config import Config, config_from_json, config_to_json
from kvstrata.core.errors import ServerUnavailable
from kvstrata.manager.report import CacheReport
from kvstrata.server.client import observe
from kvstrata.server.main import run_server
from kvstrata.server.sockets import embedded_socket

BLOCK_SIZE: Final = 32  # of the engine
DEVICE_BLOCKS: Final = 48
MAX_TOKENS: Final = 1440  # of one prompt with its continuation: nearly the whole device cache
START_SECONDS: Final = 240.0
ANSWER_SECONDS: Final = 120.0

LOGITS: Final = {"logprobs_mode": "raw_logits", "max_logprobs": -1}
ROUNDED_ALIKE: Final = {"VLLM_CPU_ATTN_SPLIT_KV": "0", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""Environment in which what else is in a forward changes no bit of a token's."""
TWO_WORKERS: Final = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "gpu_memory_utilization": 0.3,  # of a worker
}

_CONNECTOR: Final = {
    "kv_connector": "KVStrataConnector",
    "kv_connector_module_path": "kvstrata.integration.vllm.connector",
}
_LOG_TAIL_BYTES: Final = 8000
_IDLE_SECONDS: Final = 0.01


@dataclass(frozen=True)
class Ask:
    """One request: greedy, exactly *new_tokens* of continuation."""

    id: str
    prompt: tuple[int, ...]
    new_tokens: int = 4
    at_step: int = 0  # of the engine, counted in its outputs, when it arrives
    transfer: Mapping[str, Any] | None = None  # its kv_transfer_params
    salt: str | None = None  # its cache_salt
    lora: str | None = None  # folder of the adapter
    embeds: str | None = None  # file of a tensor (tokens, hidden size) that is the prompt instead
    logits: bool = False  # are wanted: of an engine with ``LOGITS`` in its settings
    images: tuple[str, ...] = ()  # files, one for each token of the prompt that stands for one


@dataclass(frozen=True)
class Act:
    """Something done to the engine between two outputs.

    *kind* is ``abort`` (of the request *what*), ``reset`` (of the prefix cache; *what* may be
    ``running``, which preempts all requests, or ``connector``, which resets our cache too), or
    ``call`` (of the parent's hook *what*; the engine goes on meanwhile).
    """

    kind: str
    what: str = ""
    at_step: int = 0


@dataclass(frozen=True)
class Answer:
    tokens: list[int]  # none of a pooling request
    cached_tokens: int
    finish_reason: str | None  # None if aborted
    seconds: float  # from arrival to the last output
    embedding: list[float] = field(default_factory=list)  # of a pooling request
    transfer: dict[str, Any] | None = None  # its kv_transfer_params
    # Of each token, (vocabulary,), if wanted.
    logits: list[list[float]] = field(default_factory=list)


class EngineFailed(AssertionError):
    """The engine died, or did not answer in time."""


@dataclass
class Engine:
    """Starts at once; the first use waits until it is ready."""

    model: Path
    log: Path
    transfer: Mapping[str, Any] | None = None  # vLLM's kv_transfer_config without the names
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str] = ()  # that runs it, as in a network of its own
    environment: Mapping[str, str] = field(default_factory=dict)
    is_split: bool = False  # into vLLM's three processes; in one it starts in a third of the time

    def __post_init__(self) -> None:
        self._tag = f"ENGINE_UNDER_TEST={uuid.uuid4()}"
        name, value = self._tag.split("=")
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(self.is_split)),
            name: value,
            **self.environment,
        }
        with self.log.open("ab") as log:
            self._process = self._started(log, env)
        self._ready = False
        self._inbox = b""
        self._asked = 0
        settings: dict[str, Any] = {
            "model": str(self.model),
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "max_model_len": MAX_TOKENS,
            "num_gpu_blocks_override": DEVICE_BLOCKS,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 8,
            "disable_log_stats": False,
        }
        if self.transfer is not None:
            named = {} if "kv_connector" in self.transfer else _CONNECTOR
            settings["kv_transfer_config"] = {**named, **self.transfer}
        self._send({**settings, **self.settings})

    def _started(
        self, log: IO[bytes], env: Mapping[str, str]
    ) -> "Forked | subprocess.Popen[bytes]":
        if not self.command:
            return Nursery.here().engine(log, env)
        return subprocess.Popen(
            [*self.command, sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env=env,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_ready(self) -> None:
        if not self._ready:
            self._receive(START_SECONDS)
            self._ready = True

    def run(
        self, todo: Sequence[Ask | Act], hooks: Mapping[str, Callable[[], object]] | None = None
    ) -> dict[str, Answer]:
        """Do all of *todo*, each at its step; the answers by request id."""
        self.wait_ready()
        self._send({"do": "run", "todo": [_as_json(each) for each in todo]})
        while "call" in (answer := self._receive(ANSWER_SECONDS)):
            assert hooks is not None
            hooks[answer["call"]]()
            self._send({})
        return {id: Answer(**fields) for id, fields in answer["answers"].items()}

    def ask(self, prompt: Sequence[int], new_tokens: int = 4) -> Answer:
        self._asked += 1
        one = Ask(f"ask-{self._asked}", tuple(prompt), new_tokens)
        return self.run([one])[one.id]

    def reset_prefix_cache(self, *, connector: bool = False) -> None:
        """Empty the device cache. It refuses while saves hold blocks, so this waits for saves."""
        self.wait_ready()

        def reset() -> bool:
            self._send({"do": "reset", "connector": connector})
            return bool(self._receive(ANSWER_SECONDS)["done"])

        wait_until(reset, "reset_prefix_cache is refused for ever")

    def counters(self) -> dict[str, float]:
        """vLLM's counters: ``name``, and ``name{label value}`` for every label."""
        self.wait_ready()
        self._send({"do": "counters"})
        counters: dict[str, float] = self._receive(ANSWER_SECONDS)["counters"]
        return counters

    def exposition(self) -> str:
        """What vLLM's ``/metrics`` would answer."""
        self.wait_ready()
        self._send({"do": "exposition"})
        text: str = self._receive(ANSWER_SECONDS)["exposition"]
        return text

    def server_pid(self) -> int | None:
        """The embedded server, found among the processes that this engine has started."""
        for pid, words in started_with(self._tag).items():
            if "kvstrata.server.main" in words:
                return pid
        return None

    def process_ids(self) -> list[int]:
        """Of all processes under the first one, vLLM's workers among them."""
        return list(descendants(self._process.pid))

    def kill(self) -> None:
        """``kill -9`` of every process of the engine, but not of its embedded server.

        The shared memory that vLLM's processes leave in /dev/shm is removed.
        """
        # vLLM renames its processes, which overwrites their environment: found as descendants.
        family = descendants(self._process.pid) | started_with(self._tag)
        left = {file for pid in family for file in shared_memory_of(pid)}
        self._process.kill()
        for pid, words in family.items():
            if "kvstrata.server.main" not in words and "resource_tracker" not in words:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        for file in left:
            file.unlink(missing_ok=True)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # noticed when the answer does not come
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _receive(self, timeout_seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_seconds
        while b"\n" not in self._inbox:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                raise self._failed(f"no answer within {timeout_seconds} s")
            data = os.read(descriptor, 1 << 20)
            if not data:
                raise self._failed("it has died")
            self._inbox += data
        line, _, self._inbox = self._inbox.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer

    def _failed(self, why: str) -> EngineFailed:
        tail = self.log_text()[-_LOG_TAIL_BYTES:]
        return EngineFailed(f"the engine: {why}\n--- the end of {self.log}\n{tail}")


def transfer_config(engine_id: str, tokens_per_block: int, **settings: Any) -> dict[str, Any]:
    """With which what is reused depends on the blocks alone, and not on who is how fast.

    The server shares the cores with everybody: slow must not be a miss.
    """
    patient = dict.fromkeys(
        ("lookup_timeout_seconds", "load_timeout_seconds", "save_timeout_seconds"), 30
    )
    own = {"recompute": "never", "tokens_per_block": tokens_per_block}
    return {
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": own | patient | settings,
    }


def bound_to_cores(workers: int) -> dict[str, str]:
    """The environment of an engine of one or two *workers*: without it vLLM wants a NUMA node for each."""
    environment = {"OMP_NUM_THREADS": "1"}
    if workers > 1:
        cores = sorted(os.sched_getaffinity(0))
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    return environment


class CacheServer:
    """A server that engines attach to."""

    def __init__(self, config: Config, socket: Path, log: Path) -> None:
        self.socket = socket
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "server", config_to_json(config), str(socket)],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        self.pid = self._process.pid
        wait_until(socket.exists, f"the server does not listen at {socket}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def report(self) -> CacheReport:
        return report_of(self.socket)


def report_of(socket: Path) -> CacheReport:
    """What the server at *socket* says of itself."""
    client = observe(socket, timeout_seconds=30.0)
    try:
        report = client.stats()
    finally:
        client.close()
    assert report is not None
    return report


def embedded_report(engine_id: str) -> CacheReport:
    return report_of(embedded_socket(engine_id))


def wait_for_worker(engine_id: str, *, workers: int = 1) -> None:
    """Until all *workers* of *engine_id* have mapped the host tier: before, nothing is saved."""

    def is_there() -> bool:
        if not server_answers(embedded_socket(engine_id)):
            return False
        ranks = [each["workers"] for each in embedded_report(engine_id).engines]
        return ranks == [list(range(workers))]

    wait_until(is_there, f"{engine_id} has no worker", seconds=START_SECONDS)


def report_at_rest(engine_id: str) -> CacheReport:
    """Of the embedded server of *engine_id*, once it loads and saves nothing.

    The engine is told of the end of a save before its server is.
    """

    def is_at_rest() -> bool:
        report = embedded_report(engine_id)
        return (report.running_gets, report.running_puts) == (0, 0)

    wait_until(is_at_rest, "loads or saves never end")
    return embedded_report(engine_id)


def wait_until_written(socket: Path) -> None:
    """Until the server at *socket* saves nothing, and nothing waits to be written to a tier below."""

    def is_written() -> bool:
        report = report_of(socket)
        return not report.running_puts and not any(t.waiting_blocks for t in report.tiers)

    wait_until(is_written, "blocks are not written to the tiers below")


def wait_for_disk(engine_id: str) -> None:
    """Until every block of the embedded server of *engine_id* is on disk."""
    wait_until_written(embedded_socket(engine_id))


def wait_until(condition: Callable[[], bool], otherwise: str, *, seconds: float = 60.0) -> None:
    """Until *condition* holds; fails with *otherwise* after *seconds*."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)  # the deadline above bounds the loop


def server_answers(socket: Path) -> bool:
    try:
        observe(socket).close()
    except ServerUnavailable:
        return False
    return True


def descendants(pid: int) -> dict[int, list[str]]:
    """Command lines of the children of *pid*, and of theirs."""
    found = {child: words for child, (parent, words) in _processes() if parent == pid}
    for child in list(found):
        found |= descendants(child)
    return found


def started_with(tag: str) -> dict[int, list[str]]:
    """Command lines of the processes that have *tag* in their environment, handed down at start."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if tag.encode() in (entry / "environ").read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                found[int(entry.name)] = words.split("\0")
    return found


def shared_memory_of(pid: int) -> set[Path]:
    """Files of Python's ``SharedMemory`` that *pid* has mapped."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        maps = Path(f"/proc/{pid}/maps").read_text()
        return {Path(name) for name in re.findall(r"/dev/shm/psm_\w+", maps)}
    return set()


def _processes() -> Iterator[tuple[int, tuple[int, list[str]]]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            yield int(entry.name), (parent, words)


def _as_json(each: Ask | Act) -> dict[str, Any]:
    kind = {"kind": "ask"} if isinstance(each, Ask) else {}
    return {**vars(each), **kind}


# -- the child ---------------------------------------------------------------------------------


class _Child:
    """Executes the parent's commands on one ``LLM``."""

    def __init__(self, commands: IO[str], answers: IO[str]) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig

        self._commands = commands
        self._answers = answers
        settings = json.loads(commands.readline())
        if "kv_events_config" in settings:
            settings["kv_events_config"] = KVEventsConfig(**settings["kv_events_config"])
        self._llm = LLM(**settings)
        self._engine = self._llm.llm_engine
        self._pools = settings.get("runner") == "pooling"
        self._loras: dict[str, int] = {}  # number of each adapter, by its folder
        self._say({"ready": True})

    def serve(self) -> None:
        while line := self._next_line():
            command = json.loads(line)
            if command["do"] == "run":
                self._say({"answers": self._run(command["todo"])})
            elif command["do"] == "reset":
                reset = self._engine.reset_prefix_cache(reset_connector=command["connector"])
                self._say({"done": reset})
            elif command["do"] == "exposition":
                self._say({"exposition": self._exposition()})
            else:
                self._say({"counters": self._counters()})

    def _next_line(self) -> str:
        """In one process nobody but us steps the engine, which has saves to end."""
        split = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
        while not split and not select.select([self._commands], [], [], _IDLE_SECONDS)[0]:
            self._engine.step()
        return self._commands.readline()

    def _run(self, todo: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        todo = sorted(todo, key=lambda each: each["at_step"])
        answers: dict[str, dict[str, Any]] = {}
        arrived: dict[str, float] = {}
        step = 0
        while todo or self._engine.has_unfinished_requests():
            if not self._engine.has_unfinished_requests():
                step = max(step, todo[0]["at_step"])
            while todo and todo[0]["at_step"] <= step:
                self._begin(todo.pop(0), arrived)
            if not self._engine.has_unfinished_requests():
                continue
            for output in self._engine.step():
                answers[output.request_id] = {
                    **(_pooled(output) if self._pools else _generated(output)),
                    "cached_tokens": output.num_cached_tokens or 0,
                    "seconds": time.monotonic() - arrived[output.request_id],
                }
            step += 1
        return answers

    def _begin(self, each: dict[str, Any], arrived: dict[str, float]) -> None:
        if each["kind"] == "ask":
            arrived[each["id"]] = time.monotonic()
            self._add(each)
        elif each["kind"] == "abort":
            self._engine.abort_request([each["what"]])
        elif each["kind"] == "call":
            self._say({"call": each["what"]})
            self._commands.readline()
        else:
            # vLLM raises if device blocks are held after all requests were preempted.
            with contextlib.suppress(Exception):
                self._engine.reset_prefix_cache(
                    reset_running_requests=each["what"] == "running",
                    reset_connector=each["what"] == "connector",
                )

    def _add(self, ask: dict[str, Any]) -> None:
        import torch
        from PIL import Image
        from vllm import PoolingParams, SamplingParams
        from vllm.lora.request import LoRARequest

        prompt: dict[str, Any] = {"prompt_token_ids": ask["prompt"]}
        if ask["embeds"]:
            prompt = {"prompt_embeds": torch.load(ask["embeds"])}
        if ask["images"]:
            prompt["multi_modal_data"] = {"image": [Image.open(file) for file in ask["images"]]}
        if ask["salt"]:
            prompt["cache_salt"] = ask["salt"]
        adapter = None
        if ask["lora"]:
            number = self._loras.setdefault(ask["lora"], len(self._loras) + 1)
            adapter = LoRARequest(Path(ask["lora"]).name, number, ask["lora"])
        params = (
            PoolingParams(task="embed")
            if self._pools
            else SamplingParams(
                max_tokens=ask["new_tokens"],
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                logprobs=-1 if ask["logits"] else None,
                extra_args=ask["transfer"] and {"kv_transfer_params": ask["transfer"]},
            )
        )
        self._engine.add_request(ask["id"], prompt, params, lora_request=adapter)

    def _counters(self) -> dict[str, float]:
        counters: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if not isinstance(value := getattr(metric, "value", None), int | float):
                continue
            names = [metric.name, *(f"{metric.name}{{{v}}}" for v in metric.labels.values())]
            for name in names:
                counters[name] = counters.get(name, 0) + value
        return counters

    def _exposition(self) -> str:
        from prometheus_client import generate_latest
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        return generate_latest(get_prometheus_registry()).decode()

    def _say(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


def _generated(output: Any) -> dict[str, Any]:
    done = output.outputs[0]
    rows = (done.logprobs or ()) if output.finished else ()  # every output has those of all tokens
    return {
        "tokens": list(done.token_ids),
        "finish_reason": done.finish_reason,
        "transfer": output.kv_transfer_params,
        "logits": [[row[i].logprob for i in sorted(row)] for row in rows],
    }


def _pooled(output: Any) -> dict[str, Any]:
    return {"tokens": [], "finish_reason": None, "embedding": output.outputs.data.tolist()}


def run_child() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print belongs to the log
    _Child(sys.stdin, answers).serve()


if __name__ == "__main__":
    if sys.argv[1:2] == ["server"]:
        run_server(config_from_json(sys.argv[2]), Path(sys.argv[3]))
    else:
        run_child()
