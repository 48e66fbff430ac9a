"""Runs what the pages tell a user to start: engines, servers and pages with what asks them, replays, benches.

It takes hours, hence `make commands` and not a part of `make test`; benches of disks need fio. A command is run as it
stands, but for what `place.Place` changes, and with `FOR_A_PROCESSOR`. `NOT_HERE` are not run.
"""

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
from tests.docs.blocks import ROOT, Command, commands
from tests.docs.place import PROMPT, WORDS, Place, servers_of, write_what_pages_show
from tests.remote.own_network import own_network
from tests.vllm.engine import wait_until

COMMANDS: Final = list({(c.environment, c.words): c for c in commands()}.values())
FOR_A_PROCESSOR: Final = [
    *("--max-model-len", "2048", "--block-size", "32", "--num-gpu-blocks-override", "128"),
    *("--enforce-eager", "--enable-prompt-tokens-details"),
]
NOT_HERE: Final = {
    "NixlConnector": "its library needs a GPU",
    "protocol=rdma": "needs such a network",
    r"bench\.overhead$": "half an hour, of which docs/performance.md has the figures",
    "--profile full": "an hour and more, of which docs/performance.md has the figures",
    r"scripts/compatibility\.py": "wants the whole working tree",
    r"scripts/mutants\.py": "wants the whole working tree",
}
SOCKET: Final = "run/kvstrata/kv.sock"


def shown(program: str, *names: str) -> list[Command]:
    """Those that can be run here, of *program* with one of *names*, if any."""
    return [
        c
        for c in COMMANDS
        if c.words[0] == program
        and (not names or c.words[1] in names)
        and not any(re.search(each, " ".join(c.words)) for each in NOT_HERE)
    ]


@pytest.fixture(autouse=True)
def _own_network(request: pytest.FixtureRequest) -> Iterator[None]:
    """In which the ports of the pages are free; only what installs needs that of the machine."""
    installs = any(word in str(request.node.name) for word in ("pip install", "scripts/"))
    with nullcontext() if installs else own_network():
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


@pytest.fixture
def place(model: Path) -> Iterator[Place]:
    with TemporaryDirectory() as folder:  # with a short name, as names of sockets have to be
        yield Place(Path(folder), model)


# --- engines ----------------------------------------------------------------------------------


ENGINE: Final = "http://localhost:8000"
PREFILL_NODE: Final = "http://localhost:8001"


def post(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read() or b"{}")
    return found


def ask(engine: str = ENGINE) -> tuple[list[int], int]:
    """The tokens of the answer, and how many of the prompt were found."""
    wanted = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = post(f"{engine}/v1/completions", {"model": "MODEL", "prompt": PROMPT, **wanted})
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens", 0)


def find_again(tokens: list[int]) -> None:
    """Once it is saved, with what vLLM itself has kept thrown away."""

    def is_found() -> bool:
        post(f"{ENGINE}/reset_prefix_cache")
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


@pytest.mark.parametrize(
    ("command", "clients"), [pytest.param(*each, id=str(each[0])) for each in starts()]
)
def test_an_engine_finds_again_what_it_has_computed(
    command: Command, clients: list[Command], place: Place
) -> None:
    write_what_pages_show(place)
    text = " ".join(command.words)
    with servers_of(place, text), ExitStack() as stack:
        if "--attach" in command.words:
            server = next(c for c in shown("kvstrata", "server") if "--disk" in c.words)
            stack.enter_context(place.started(server, ready=str(place.folder / SOCKET)))
        if "kv_consumer" in text:
            (producer,) = (c for c, _ in starts() if "kv_producer" in c.words)
            beside = ["--port", "8001", *FOR_A_PROCESSOR]
            stack.enter_context(place.started(producer, *beside, ready=PREFILL_NODE + "/health"))
            ask(PREFILL_NODE)
        stack.enter_context(place.started(command, *FOR_A_PROCESSOR, ready=ENGINE + "/health"))
        tokens, _ = ask()
        if "kv_producer" not in text:  # which loads nothing
            find_again(tokens)
        for client in clients:
            fails = ["--fail-with-body"] if client.words[0] == "curl" else []
            place.run(client, *fails)


# --- servers and pages --------------------------------------------------------------------------


@pytest.mark.parametrize("command", shown("kvstrata", "server"), ids=str)
def test_a_server_starts(command: Command, place: Place) -> None:
    with (
        servers_of(place, " ".join(command.words)),
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
