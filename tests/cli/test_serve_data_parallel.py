"""`vllm serve --data-parallel-size 2` whose engines share one server, as `kvstrata serve` starts it."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.caches import eventually
from tests.cli.processes import kvstrata, running, until
from tests.cli.test_serve_http import answer_to, is_healthy
from tests.ports import free_port

pytestmark = pytest.mark.vllm

PROMPT_TOKENS = 513


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def url(folder: Path, tiny_llama: Path) -> Iterator[str]:
    port, socket = free_port(), folder / "s.sock"
    log, environment = folder / "vllm.log", {"TMPDIR": str(folder)}
    server = ("server", "--socket", str(socket), "--host-size", "64MiB")
    arguments = ["serve", str(tiny_llama), "--attach", str(socket), "--data-parallel-size", "2"]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    arguments += ["--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"]
    arguments += ["--block-size", "32", "--max-model-len", "1024"]
    arguments += ["--enable-prompt-tokens-details", "--num-gpu-blocks-override", "80"]
    engines = environment | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "KVSTRATA_LOOKUP_TIMEOUT_SECONDS": "30",
    }
    with running(*server, log=folder / "server.log", env=environment):
        until(socket.exists, 60, folder / "server.log")
        with running(*arguments, log=log, env=engines) as process:
            address = f"http://127.0.0.1:{port}"
            until(lambda: process.poll() is not None or is_healthy(address), 300, log)
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            yield address


def saved_blocks(folder: Path) -> int:
    shown = kvstrata("stats", "--json", env={"KVSTRATA_SOCKET": str(folder / "s.sock")})
    (server,) = json.loads(shown.stdout)["servers"]
    found: int = server["report"]["counters"]["kvstrata_saved_blocks_total"]
    return found


def asked(url: str, prompt: list[int], rank: int) -> tuple[list[int], int]:
    """What the engine of that *rank* says, and how many tokens it has not computed."""
    answer: dict[str, Any] = answer_to(url, prompt, **{"X-data-parallel-rank": str(rank)})
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["token_ids"], details["cached_tokens"] if details else 0


@pytest.mark.parametrize("first", [0, 1])
def test_what_one_engine_has_computed_the_other_loads(url: str, folder: Path, first: int) -> None:
    choose = random.Random(first)
    prompt = [choose.randrange(1, 1000) for _ in range(PROMPT_TOKENS)]
    before = saved_blocks(folder)
    said, cached = asked(url, prompt, first)
    assert cached == 0
    eventually(lambda: saved_blocks(folder) >= before + 8, "the prompt is not saved")
    assert asked(url, prompt, 1 - first) == (said, PROMPT_TOKENS - 1)
