"""One vLLM engine in a process of its own, asked over pipes: the measured side of ``vllm_hit.py``.

    python bench/engines.py '{"configuration": "kvstrata", "folder": "/tmp/x", ...}'

Takes one JSON object a line on standard input and answers each with one on standard output:

* ``{"ask": [token ids]}`` → ``{"seconds": wall time to the first token, "cached_tokens": n}``
* ``{"blend": [token ids]}`` → the same, of a request that asks to be blended
* ``{"batch": {"prompts": [[token ids]], "new_tokens": n}}`` → the same for all of them together,
  the time being that to the last token
* ``{"reset": true}`` → ``{"reset": whether the prefix cache is empty now}``
* ``{"counters": true}`` → ``{"counters": {name: value}}`` of KVStrata's server, ``{}`` for others

The first line, ``{"ready": true, "helpers": [process ids]}``, comes unasked: the helpers are the
engine's processes that do not descend from this one.
"""

import dataclasses
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

__all__ = ["Order", "transfer_config"]

BLOCK_TOKENS: Final = 32
MAX_MODEL_TOKENS: Final = 8192
PEER_SECONDS: Final = 120.0  # for LMCache's daemon to listen


@dataclasses.dataclass(frozen=True)
class Order:
    """What to start."""

    configuration: str
    folder: str  # for this engine's files
    model: str
    dtype: str
    engine_id: str
    host_bytes: int  # of a configuration that is to keep everything in host memory
    small_host_bytes: int  # of one that is to forget it soon
    disk_bytes: int
    port: int = 0  # of a peer's daemon


def transfer_config(order: Order) -> dict[str, Any] | None:
    """vLLM's ``kv_transfer_config`` for the named configuration."""
    disk = f"{order.folder}/disk"
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "kvstrata": lambda: _kvstrata(order, f"host:{order.host_bytes}"),
        "kvstrata-layerwise": lambda: _kvstrata(
            order, f"host:{order.host_bytes}", load_mode="layerwise"
        ),
        "kvstrata-blend": lambda: (
            _kvstrata(order, f"host:{order.host_bytes}", blend_audit_share=0)
            | {
                "kv_connector": "BlendConnector",
                "kv_connector_module_path": "kvstrata.integration.vllm.blend.connector",
            }
        ),
        "kvstrata-disk": lambda: _kvstrata(
            order, f"host:{order.small_host_bytes} | disk:{disk}:{order.disk_bytes}"
        ),
        "native": lambda: _native(order, order.host_bytes, []),
        "native-disk": lambda: _native(
            order, order.small_host_bytes, [{"type": "fs", "root_dir": disk}]
        ),
        "example": lambda: {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": disk},
        },
        "lmcache": lambda: {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": str(order.port),
            },
        },
    }
    if order.configuration == "none":
        return None
    return makers[order.configuration]() | {"engine_id": order.engine_id}


def _kvstrata(order: Order, tiers: str, **settings: object) -> dict[str, Any]:
    return {
        "kv_connector": "KVStrataConnector",
        "kv_connector_module_path": "kvstrata.integration.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": tiers, **settings},
    }


def _native(order: Order, host_bytes: int, secondary: list[dict[str, Any]]) -> dict[str, Any]:
    extra: dict[str, Any] = {
        "spec_name": "CpuPagesSpec",
        "spec_module_path": "kvstrata.bench.native_tiering",
        "cpu_bytes_to_use": host_bytes,
        "secondary_tiers": secondary,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


@contextmanager
def daemon(order: Order) -> Iterator[None]:
    """LMCache's own process, for the engine that needs it."""
    if order.configuration != "lmcache":
        yield
        return
    command = f"-m lmcache.cli.main server --host 127.0.0.1 --port {order.port}"
    settings = (
        f"--http-host 127.0.0.1 --http-port {_free_port()} --shm-name {order.engine_id} "
        f"--l1-size-gb {order.host_bytes / (1 << 30)} --chunk-size 256 --eviction-policy LRU "
        "--supported-transfer-mode auto"
    )
    process = subprocess.Popen(
        [sys.executable, *command.split(), *settings.split()],
        env=os.environ | {"LMCACHE_TRACK_USAGE": "false"},
    )
    try:
        _wait_for_port(order.port, process)
        yield
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + PEER_SECONDS
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError(f"LMCache's daemon does not listen at port {port}")
        time.sleep(0.1)  # the deadline above bounds the loop


def serve(order: Order, requests: TextIO, replies: TextIO) -> None:
    """Start the engine and answer until *requests* ends."""
    from vllm import LLM, SamplingParams

    Path(order.folder, "disk").mkdir(parents=True, exist_ok=True)
    engine = LLM(
        model=order.model,
        dtype=order.dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=MAX_MODEL_TOKENS,
        enable_prefix_caching=True,
        kv_transfer_config=transfer_config(order),
        seed=0,
    )
    one_token = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)

    blended = one_token.clone()
    blended.extra_args = {"kv_transfer_params": {"blend": True}}

    def ask(tokens: list[int], sampling: SamplingParams = one_token) -> dict[str, Any]:
        started = time.perf_counter()
        output = engine.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)[0]
        return {
            "seconds": time.perf_counter() - started,
            "cached_tokens": output.num_cached_tokens or 0,
        }

    def batch(wanted: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(
            max_tokens=wanted["new_tokens"], temperature=0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": tokens} for tokens in wanted["prompts"]]
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return {
            "seconds": time.perf_counter() - started,
            "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        }

    def reset(_: bool) -> dict[str, Any]:
        return {"reset": engine.reset_prefix_cache()}

    def counters(_: bool) -> dict[str, Any]:
        return {"counters": _counters(order)}

    actions: dict[str, Callable[[Any], dict[str, Any]]] = {
        "ask": ask,
        "blend": lambda tokens: ask(tokens, blended),
        "batch": batch,
        "reset": reset,
        "counters": counters,
    }
    print(json.dumps({"ready": True, "helpers": _helpers(order)}), file=replies, flush=True)
    for line in requests:
        ((action, argument),) = json.loads(line).items()
        print(json.dumps(actions[action](argument)), file=replies, flush=True)


def _helpers(order: Order) -> list[int]:
    if not order.configuration.startswith("kvstrata"):
        return []
    from kvstrata.server.sockets import embedded_socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.connect(str(embedded_socket(order.engine_id)))
        peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return [struct.unpack("3i", peer)[0]]  # of whoever listens: the server


def _counters(order: Order) -> dict[str, int]:
    if not order.configuration.startswith("kvstrata"):
        return {}
    from kvstrata.server.client import observe
    from kvstrata.server.sockets import embedded_socket

    client = observe(embedded_socket(order.engine_id))
    try:
        report = client.stats()
    finally:
        client.close()
    return report.counters if report else {}


def main() -> None:
    # What the engine's processes print must not come between the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    order = Order(**json.loads(sys.argv[1]))
    if order.configuration == "lmcache":
        order = dataclasses.replace(order, port=_free_port())
    with daemon(order):
        serve(order, sys.stdin, replies)


if __name__ == "__main__":
    main()
