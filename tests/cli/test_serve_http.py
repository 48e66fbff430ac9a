"""`kvstrata serve` with a real vLLM, asked over HTTP."""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.caches import eventually
from tests.cli.processes import SOURCE, environment, kvstrata, running, until
from tests.collector import Collector, attributes, collecting
from tests.ports import free_port

pytestmark = pytest.mark.vllm

PROMPT_TOKENS = 513
DEVICE_BLOCKS = 80  # of 32 tokens: four prompts fill them
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("http")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def url(folder: Path, tiny_llama: Path, collector: Collector) -> Iterator[str]:
    port = free_port()
    arguments = [str(tiny_llama), "--host-size", "64MiB", "--blend"]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
    arguments += ["--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"]
    arguments += ["--block-size", "32", "--max-model-len", "2400"]
    arguments += ["--enable-prompt-tokens-details"]
    arguments += ["--num-gpu-blocks-override", str(DEVICE_BLOCKS)]
    arguments += ["--otlp-traces-endpoint", collector.address]
    log = folder / "vllm.log"
    variables = {
        "TMPDIR": str(folder),
        "KVSTRATA_LOOKUP_TIMEOUT_SECONDS": "30",
        "KVSTRATA_OTLP_TRACES_ENDPOINT": collector.address,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",  # of vLLM's own spans
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
    with running("serve", *arguments, log=log, env=variables) as process:
        address = f"http://127.0.0.1:{port}"
        until(lambda: process.poll() is not None or is_healthy(address), 300, log)
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        yield address


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def complete(address: str, prompt: list[int]) -> list[int]:
    tokens: list[int] = answer_to(address, prompt)["choices"][0]["token_ids"]
    return tokens


def answer_to(address: str, prompt: list[int], **headers: str) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
    }
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def counters(folder: Path) -> dict[str, Any]:
    shown = kvstrata("stats", "--json", env={"TMPDIR": str(folder)})
    (server,) = json.loads(shown.stdout)["servers"]
    found: dict[str, Any] = server["report"]["counters"]
    return found


def test_a_prompt_that_the_device_forgot_is_loaded_and_answered_alike(
    url: str, folder: Path
) -> None:
    choose = random.Random(1)
    prompts = [[choose.randrange(1, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(7)]
    loaded, hits = "kvstrata_loaded_blocks_total", "vllm:external_prefix_cache_hits_total"
    loaded_before, hits_before = counters(folder)[loaded], metric(url, hits)
    first, *others = [complete(url, prompt) for prompt in prompts]
    assert first not in others
    assert (counters(folder)[loaded], metric(url, hits)) == (loaded_before, hits_before)

    assert complete(url, prompts[0]) == first
    assert counters(folder)[loaded] == loaded_before + 8
    assert metric(url, hits) == hits_before + 512

    inspected = kvstrata("inspect", env={"TMPDIR": str(folder)})
    assert "1 of 1" in inspected.stdout


def test_metrics_of_vllm_have_those_of_its_server(url: str, folder: Path) -> None:
    choose = random.Random(3)
    complete(url, [choose.randrange(1, 1000) for _ in range(PROMPT_TOKENS)])

    def is_told() -> bool:
        """The last steps are told when the engine is idle again, not with the next request."""
        told = counters(folder)
        names = [f"kvstrata_{name}_total" for name in ("lookups", "saved_blocks", "loaded_blocks")]
        return all(metric(url, name) == told[name] for name in names)

    eventually(is_told, "vLLM's metrics are not those of the server")
    assert metric(url, "kvstrata_saved_blocks_total") >= 8
    assert metric(url, "kvstrata_tier_used_bytes") > 0
    assert metric(url, "kvstrata_connected") == 1
    assert metric(url, "kvstrata_save_seconds_count") >= 1


def test_prompt_is_pinned_by_the_id_of_its_response(url: str, folder: Path) -> None:
    """vLLM adds to that id what tells requests of one id apart."""
    choose = random.Random(2)
    prompt = [choose.randrange(1, 1000) for _ in range(PROMPT_TOKENS)]
    saved = "kvstrata_saved_blocks_total"
    wanted = counters(folder)[saved] + PROMPT_TOKENS // 64
    name = answer_to(url, prompt)["id"]
    eventually(lambda: counters(folder)[saved] >= wanted, "the prompt is not saved")
    env = {"TMPDIR": str(folder)}
    explained = kvstrata("inspect", "--explain", name, "--json", env=env)
    (server,) = json.loads(explained.stdout)["servers"]
    assert server["decisions"]
    assert all(each["request"] != name for each in server["decisions"])
    pinned = kvstrata("pin", "--request", name, "--json", env=env)
    (pin,) = json.loads(pinned.stdout)["pins"]
    assert pin["blocks"] == PROMPT_TOKENS // 64
    assert kvstrata("unpin", str(pin["number"]), env=env).returncode == 0


def test_spans_stand_in_the_trace_of_the_http_request(url: str, collector: Collector) -> None:
    """Beside vLLM's own; without a header each is a trace of its own."""
    choose = random.Random(4)
    first, second = ([choose.randrange(1, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(2))
    traced = answer_to(url, first, traceparent=f"00-{TRACE}-{PARENT}-01")["id"]
    untraced = answer_to(url, second)["id"]

    def spans_of(request: str) -> dict[str, tuple[str, str]]:
        """Of one request: names, and the trace and the span above that each is of."""
        return {
            span.name: (span.trace_id.hex(), span.parent_span_id.hex())
            for span in list(collector.spans)
            for name in ("kvstrata.request", "gen_ai.request.id")
            if str(attributes(span).get(name, "")).startswith(request)
        }

    kinds = {"llm_request", "kvstrata.lookup", "kvstrata.save"}
    eventually(
        lambda: kinds <= spans_of(traced).keys() and kinds <= spans_of(untraced).keys(),
        "not all spans have come",
    )
    assert spans_of(traced) == dict.fromkeys(kinds, (TRACE, PARENT))
    assert all(above == "" for _, above in spans_of(untraced).values())
    assert len({trace for trace, _ in spans_of(untraced).values()}) == len(kinds)


def test_the_example_says_what_is_wrong_with_a_model_that_is_not_served(url: str) -> None:
    example = Path(__file__).parents[2] / "examples" / "rag.py"
    command = [sys.executable, str(example), "other", "--url", url, "--random", "2"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith(f"error: {url}/v1/completions answers 404: The model `other`")
    assert run.stderr.endswith("hint: the first argument is a model that GET /v1/models names\n")


def test_the_example_reuses_documents_in_another_order(url: str) -> None:
    """The second question follows at once: where the first is not saved yet, it is computed."""
    example = Path(__file__).parents[2] / "examples" / "rag.py"
    seeds = iter(range(10))

    def shows_it() -> bool:
        arguments = ["tiny", "--url", url, "--random", "5", "--seed", str(next(seeds))]
        run = subprocess.run(
            [sys.executable, str(example), *arguments], capture_output=True, text=True, check=True
        )
        shown = r"(\w+) {2,}.* (\d+) of 2030 tokens cached(?:, approximate from token (\d+) on)?  "
        cached = re.findall(shown, run.stdout)
        return cached == [("computed", "0", ""), ("blended", "2016", "0"), ("exactly", "0", "")]

    eventually(shows_it, "documents in another order are not reused")
    assert metric(url, "kvstrata_blend_tokens_total") > 2000


def test_what_vllm_serve_itself_looks_at_is_heard_with_the_package_of_a_cpu_build() -> None:
    options = ["--host-size", "64MiB", "--headless", "--api-server-count", "2"]
    done = kvstrata("serve", "nowhere", *options)
    assert done.returncode == 1
    assert "--api-server-count=2 cannot be used with --headless" in done.stderr, done.stderr


def test_beside_a_python_of_the_system_it_is_vllm_serve_that_runs(tmp_path: Path) -> None:
    """Its program lies elsewhere; a module of one API server would not look at these options."""
    vllm = importlib.util.find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    packages = Path(vllm.origin).parents[1]
    named = tmp_path / "vllm-0.32.0+cpu.dist-info"  # the package of a CPU build is another
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    sources = tmp_path / "sources"  # vLLM's, not built
    (sources / "vllm").mkdir(parents=True)
    (sources / "vllm" / "__init__.py").write_text("raise ImportError")
    options = ["--host-size", "64MiB", "--headless", "--api-server-count", "2"]
    done = subprocess.run(
        [os.path.realpath(sys.executable), "-m", "kvstrata", "serve", "nowhere", *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=sources,
        env=environment(PYTHONPATH=os.pathsep.join(map(str, (SOURCE, tmp_path, packages)))),
        timeout=300,
    )
    assert done.returncode == 1
    assert "--api-server-count=2 cannot be used with --headless" in done.stderr, done.stderr
