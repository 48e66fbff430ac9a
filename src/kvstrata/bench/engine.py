"""One vLLM engine in a process of its own, asked over pipes: the measured side of the bench.

Its deployment and then its orders are lines of JSON on standard input, its replies lines on
standard output (``traffic.Order``, ``traffic.Reply``); what vLLM prints goes to standard error.
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
import zlib
from array import array
from collections import deque
from itertools import pairwise
from typing import IO, Any, Final

import msgspec

from kvstrata.bench.contenders import Deployment, counts_path, transfer_config
from kvstrata.bench.counts import read_counts
from kvstrata.bench.traffic import (
    Answer,
    Ask,
    Conversation,
    Counted,
    Counters,
    Order,
    Ran,
    Ready,
    Reply,
    Run,
    Traffic,
    WasReset,
)
from kvstrata.core.errors import ServerUnavailable
from kvstrata.server.client import ManagerClient, observe
from kvstrata.server.sockets import embedded_socket, peer_of

ANSWER_SECONDS: Final = 60.0  # for one turn: an engine whose connector hangs is not waited for

_LOADED_BYTES: Final = "kvstrata_loaded_bytes_total"
_SAVED_BLOCKS: Final = "kvstrata_saved_blocks_total"
_PROMOTED: Final = "kvstrata_promoted_blocks_total{{tier={}}}"


class Engine:
    """Asks the engine that it starts."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._engine = _start(deployment)
        self._requests = 0
        self._server: ManagerClient | None = None

    async def run(self, traffic: Traffic) -> Ran:
        began = time.perf_counter()
        answers: list[Answer] = []
        waiting: deque[_Talk] = deque()
        tasks = []
        for number, conversation in enumerate(traffic.conversations):
            talk = _Talk(number, conversation)
            if conversation.due_seconds is None:
                waiting.append(talk)
            else:
                due = began + conversation.due_seconds
                tasks.append(self._keep_time(talk, due, traffic.blend, answers))
        tasks += [self._take_turns(waiting, traffic.blend, answers) for _ in range(traffic.users)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(traffic.cut_seconds):
                await asyncio.gather(*tasks)
        answers.sort(key=lambda answer: (answer.conversation, answer.turn))
        return Ran(time.perf_counter() - began, answers, self._engine.errored)

    async def _keep_time(
        self, talk: "_Talk", due: float, blend: bool, answers: list[Answer]
    ) -> None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        while not talk.is_over:
            answers += await self._ask(talk, due, blend)
            due = time.perf_counter()

    async def _take_turns(
        self, waiting: "deque[_Talk]", blend: bool, answers: list[Answer]
    ) -> None:
        while waiting:
            talk = waiting.popleft()
            answers += await self._ask(talk, time.perf_counter(), blend)
            if not talk.is_over:
                waiting.append(talk)

    async def _ask(self, talk: "_Talk", asked: float, blend: bool) -> list[Answer]:
        """The answer of the next turn; if it fails, the failures of those behind it, too."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt, answer_tokens = talk.next_prompt()
        sampling = SamplingParams(
            max_tokens=answer_tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": {"blend": True}} if blend else None,
        )
        self._requests += 1
        times: list[float] = []
        cached, failure = 0, None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                async for output in self._engine.generate(
                    {"prompt_token_ids": prompt}, sampling, f"bench-{self._requests}"
                ):
                    times.append(time.perf_counter())
                    cached = output.num_cached_tokens or cached
                    talk.hear(output.outputs[0].token_ids)
                    if output.outputs[0].finish_reason == "error":
                        failure = "the engine ended it with an error"
        except TimeoutError:
            failure = f"no answer in {ANSWER_SECONDS:.0f} s"
        except Exception as e:  # noqa: BLE001 - whatever an engine dies of is what is measured
            failure = f"{type(e).__name__}: {e}"
        if not times:
            failure = failure or "it ended without an answer"
            times = [time.perf_counter()]
        answer = Answer(
            talk.number,
            talk.turn - 1,
            len(prompt),
            cached,
            times[0] - asked,
            [round(later - sooner, 6) for sooner, later in pairwise(times)],
            len(talk.heard),
            failure,
            zlib.crc32(array("q", talk.heard)),
        )
        return [answer, *(talk.given_up() if failure else ())]

    async def reset(self) -> WasReset:
        return WasReset(bool(await self._engine.reset_prefix_cache()))

    def counters(self) -> Counted:
        """Of KVStrata's server, if it answers, or of the worker of a peer."""
        if not self._deployment.contender.startswith("kvstrata"):
            return Counted(Counters(_moved_by_peer(self._deployment)))
        servers = self._server_pids()
        try:
            self._server = self._server or observe(self._socket())
            report = self._server.stats()
        except ServerUnavailable:  # it was killed; the next one is asked anew
            self._leave_server()
            report = None
        if report is None:
            return Counted(Counters(), servers)
        moved = {f"{o.tier} {o.operation}": o.moved_bytes for o in report.operations}
        loaded = (c for n, c in report.counters.items() if n.startswith(_LOADED_BYTES))
        moved["host read"] = sum(loaded)
        if report.tiers:
            saved = report.counters.get(_SAVED_BLOCKS, 0)
            moved["host write"] = saved * report.tiers[0].block_bytes
        tiers = ("disk", "remote")
        promoted = {tier: report.counters.get(_PROMOTED.format(tier), 0) for tier in tiers}
        return Counted(Counters(moved, promoted, not report.is_at_rest), servers)

    def close(self) -> None:
        self._leave_server()
        self._engine.shutdown()

    def _leave_server(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None

    def _server_pids(self) -> list[int]:
        """Of the one that listens now: an engine replaces its own when that was killed."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(self._socket())):
                return []
            return [peer_of(probe).pid]

    def _socket(self) -> Any:
        if self._deployment.contender == "kvstrata-attached":
            return f"{self._deployment.folder}/server.sock"
        return embedded_socket(self._deployment.engine_id)


class _Talk:
    """How far a conversation has come."""

    def __init__(self, number: int, conversation: Conversation) -> None:
        self.number = number
        self.turn = 0  # the next one
        self.heard: list[int] = []  # tokens of the last answer
        self._turns = conversation.turns
        self._said: list[int] = []

    @property
    def is_over(self) -> bool:
        return self.turn >= len(self._turns)

    def next_prompt(self) -> tuple[list[int], int]:
        turn = self._turns[self.turn]
        self.turn += 1
        self.heard = []
        self._said += turn.tokens
        return list(self._said), turn.answer_tokens

    def hear(self, tokens: Any) -> None:
        self._said += tokens
        self.heard += tokens

    def given_up(self) -> list[Answer]:
        """End it: one failure for each turn that nobody will ask any more."""
        unasked = range(self.turn, len(self._turns))
        self.turn = len(self._turns)
        why = "an answer before it failed"
        return [Answer(self.number, turn, 0, 0, 0.0, [], 0, why) for turn in unasked]


def _moved_by_peer(deployment: Deployment) -> dict[str, int]:
    counts = read_counts(counts_path(deployment))
    if counts is None:
        return {}
    tier = "disk" if deployment.contender == "example" else "host"
    return dict(zip((f"{tier} read", f"{tier} write"), counts, strict=True))


def _start(deployment: Deployment) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    from kvstrata.bench.contenders import CONTENDERS

    device = current_platform.device_type
    roomy = CONTENDERS[deployment.contender].roomy
    blocks = deployment.roomy_blocks if roomy else deployment.device_blocks
    optional: dict[str, Any] = {
        "num_gpu_blocks_override": blocks,
        "block_size": deployment.block_tokens,
        "kv_transfer_config": transfer_config(deployment, device),
    }
    if device != "cpu":
        # A size that is given: to find one vLLM measures how much memory is free, twice, and dies if
        # another engine has meanwhile given some back.
        optional["kv_cache_memory_bytes"] = (
            blocks * deployment.block_tokens * deployment.token_bytes
        )
        optional["gpu_memory_utilization"] = deployment.device_share
    arguments = AsyncEngineArgs(
        model=deployment.model,
        dtype=deployment.dtype,
        skip_tokenizer_init=True,
        enforce_eager=device == "cpu",
        max_model_len=deployment.max_model_tokens,
        enable_prefix_caching=True,
        seed=0,
        disable_log_stats=True,
        **optional,
    )
    return AsyncLLM.from_engine_args(arguments)


async def _serve(deployment: Deployment, orders: IO[bytes], replies: IO[bytes]) -> None:
    """Answer until *orders* ends: whoever asks may die while an order is carried out."""
    loop = asyncio.get_running_loop()
    engine = Engine(deployment)

    def reply(message: Reply) -> None:
        replies.write(msgspec.json.encode(message) + b"\n")
        replies.flush()

    async def carry_out(line: bytes) -> None:
        match msgspec.json.decode(line, type=Order):
            case Run(traffic):
                reply(await engine.run(traffic))
            case Ask("reset"):
                reply(await engine.reset())
            case Ask("counters"):
                reply(await loop.run_in_executor(None, engine.counters))

    lines: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        for line in orders:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, b"")

    reply(Ready())
    threading.Thread(target=read, daemon=True).start()
    try:
        async with asyncio.TaskGroup() as group:  # what fails ends this too
            at_work: asyncio.Task[None] | None = None
            while line := await lines.get():
                at_work = group.create_task(carry_out(line))
            if at_work is not None:
                at_work.cancel()
    finally:
        engine.close()


def main() -> None:
    deployment = msgspec.json.decode(sys.stdin.buffer.readline(), type=Deployment)
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # before vLLM is imported: it prints
        asyncio.run(_serve(deployment, sys.stdin.buffer, replies))


if __name__ == "__main__":
    main()
