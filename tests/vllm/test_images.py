"""Real vLLM on a model that sees: a block is that of the images before and in it, too."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from PIL import Image
from tests.vllm.engine import Act, Ask, Engine, report_at_rest, transfer_config, wait_for_worker
from tests.vllm.tiny_idefics3 import IMAGE, IMAGE_TOKENS, WORDS, write_tiny_idefics3

pytestmark = pytest.mark.vllm

TOKENS_PER_BLOCK = 64
NEW_TOKENS = 8
SETTINGS = {"skip_tokenizer_init": False}  # vLLM puts the tokens of images into prompts by text


@dataclass
class Subject:
    engine: Engine
    alone: Engine
    name: str

    def cached_tokens(self, asks: Sequence[Ask]) -> list[int]:
        """Of each, asked with an empty device cache and answered as by vLLM alone."""
        right = self.alone.run(asks)
        assert len({tuple(answer.tokens) for answer in right.values()}) == len(asks)
        found = []
        for ask in asks:
            self.engine.reset_prefix_cache()  # waits until the last answer is saved
            answer = self.engine.run([ask])[ask.id]
            assert (answer.tokens, answer.finish_reason) == (right[ask.id].tokens, "length"), ask.id
            found.append(answer.cached_tokens)
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_idefics3(tmp_path_factory.mktemp("models") / "tiny-idefics3")


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Engine]:
    settings = SETTINGS | {"enable_prefix_caching": False}
    with Engine(model, model / "alone.log", settings=settings) as engine:
        yield engine


@pytest.fixture(scope="module", params=["auto", "blockwise"])
def subject(
    request: pytest.FixtureRequest,
    model: Path,
    alone: Engine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Subject]:
    name = f"images-{random.randrange(1 << 30)}"
    transfer = transfer_config(name, TOKENS_PER_BLOCK, tiers="host:64MiB", load_mode=request.param)
    log = tmp_path_factory.mktemp("images") / "vllm.log"
    with Engine(model, log, transfer, SETTINGS) as engine:
        engine.wait_ready()
        wait_for_worker(name)
        yield Subject(engine, alone, name)


def text(seed: int, tokens: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(WORDS) for _ in range(tokens))


def image(folder: Path, seed: int) -> str:
    file = folder / f"{seed}.png"
    Image.frombytes("RGB", (96, 80), random.Random(seed).randbytes(96 * 80 * 3)).save(file)
    return str(file)


def tokens_of(ask: Ask) -> int:
    """With those that vLLM puts in the place of each image."""
    return len(ask.prompt) + len(ask.images) * (IMAGE_TOKENS - 1)


def test_blocks_are_shared_up_to_where_images_part(subject: Subject, tmp_path: Path) -> None:
    """The first image is tokens 100 to 246, a second one begins at 307."""
    one, two, three = (image(tmp_path, seed) for seed in range(3))
    seen = (*text(1, 100), IMAGE, *text(2, 60))
    asked_else = (*text(1, 100), IMAGE, *text(3, 60))
    seen_twice = (*seen, IMAGE, *text(4, 30))
    asks = [
        Ask("one", seen, NEW_TOKENS, images=(one,)),
        Ask("two", seen, NEW_TOKENS, images=(two,)),
        Ask("one-asked-else", asked_else, NEW_TOKENS, images=(one,)),
        Ask("one-two", seen_twice, NEW_TOKENS, images=(one, two)),
        Ask("one-three", seen_twice, NEW_TOKENS, images=(one, three)),
        Ask("two-one", seen_twice, NEW_TOKENS, images=(two, one)),
        Ask("three-one", seen_twice, NEW_TOKENS, images=(three, one)),
    ]
    assert subject.cached_tokens(asks) == [0, 64, 192, 256, 256, 256, 64]
    assert [tokens_of(ask) for ask in asks] == [307, 307, 307, 484, 484, 484, 484]
    assert subject.cached_tokens(asks) == [256, 256, 256, 448, 448, 448, 448]


def test_an_image_is_known_by_what_it_shows(subject: Subject, tmp_path: Path) -> None:
    """Another file of the same pixels, and one in which a single pixel is black."""
    prompt = (*text(5, 70), IMAGE, *text(6, 40))
    one = image(tmp_path, 5)
    with Image.open(one) as shown:
        shown.save(tmp_path / "same.bmp")
        shown.putpixel((0, 0), (0, 0, 0))
        shown.save(tmp_path / "changed.png")
    ask = Ask("shown", prompt, NEW_TOKENS, images=(one,))
    same = replace(ask, id="same", images=(str(tmp_path / "same.bmp"),))
    changed = replace(ask, id="changed", images=(str(tmp_path / "changed.png"),))
    assert tokens_of(ask) == 257
    assert subject.cached_tokens([ask]) == [0]
    assert subject.cached_tokens([same]) == [256]
    assert subject.cached_tokens([changed]) == [64]


def test_all_at_once_with_preemption_and_resets(subject: Subject, tmp_path: Path) -> None:
    rng = random.Random(7)
    files = [image(tmp_path, seed) for seed in range(4)]
    asks = []
    for i in range(24):
        images = tuple(rng.choice(files) for _ in range(rng.randrange(1, 4)))
        prompt = text(10, rng.choice((30, 100)))
        for _ in images:
            prompt += (IMAGE, *text(11, 40))
        new_tokens, at_step = rng.randrange(1, 30), rng.randrange(80)
        asks.append(Ask(f"all-{i}", prompt, new_tokens, at_step, images=images))
    resets = [Act("reset", at_step=rng.randrange(80)) for _ in range(6)]
    resets += [Act("reset", "running", at_step=rng.randrange(80)) for _ in range(3)]
    right = subject.alone.run(asks)
    subject.engine.reset_prefix_cache()
    before = subject.engine.counters()["vllm:num_preemptions"]
    answers = subject.engine.run([*asks, *resets])
    assert {id: each.tokens for id, each in answers.items()} == {
        id: each.tokens for id, each in right.items()
    }
    assert subject.engine.counters()["vllm:num_preemptions"] > before
    report = report_at_rest(subject.name)
    assert report.counters["kvstrata_loaded_blocks_total"] > 0
    assert report.counters["kvstrata_failed_loads_total"] == 0
