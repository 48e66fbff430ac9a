"""vLLM's own reading of a timed trace against ours."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.benchmarks.datasets.datasets import TimedTrace

from kvstrata.replay.formats import Reading, open_trace
from kvstrata.replay.id_trace import FIELDS

TOKENS = 16


def write_random_trace(path: Path) -> None:
    """Prompts that share beginnings, with ids that also stand behind other beginnings."""
    dice = random.Random(4)
    with path.open("w") as file:
        for second in range(200):
            ids = [dice.randrange(4) for _ in range(dice.randrange(1, 9))]
            tail = dice.randrange(TOKENS)
            line = {
                "timestamp": second,
                "input_length": (len(ids) - 1) * TOKENS + (tail or TOKENS),
                "output_length": 1,
                "hash_ids": ids,
            }
            file.write(json.dumps(line) + "\n")


@pytest.mark.parametrize("blocks_together", [1, 2])
def test_two_blocks_are_one_exactly_where_vllm_makes_the_same_tokens(
    tmp_path: Path, blocks_together: int
) -> None:
    path = tmp_path / "trace.jsonl"
    write_random_trace(path)
    tokens_per_block = TOKENS * blocks_together
    theirs = TimedTrace(
        dataset_path=str(path),
        timed_trace_chunk_hash_size=TOKENS,
        **{f"timed_trace_label_{name}": name for name in FIELDS},
    )
    tokenizer = SimpleNamespace(
        get_vocab=lambda: {str(token): token for token in range(50_000)}, all_special_ids=[0]
    )
    samples = theirs.sample(tokenizer, num_requests=1000)
    ours = list(open_trace(path, Reading(tokens_per_block=tokens_per_block)).read())
    assert len(samples) == len(ours) == 200
    tokens_of: dict[int, tuple[int, ...]] = {}
    blocks_of: dict[tuple[int, ...], int] = {}
    for sample, request in zip(samples, ours, strict=True):
        assert sample.timestamp == request.arrival_seconds
        assert len(sample.prompt) == request.input_tokens
        assert len(request.blocks) == len(sample.prompt) // tokens_per_block
        for number, block in enumerate(request.blocks.tolist(), start=1):
            beginning = tuple(sample.prompt[: number * tokens_per_block])
            assert tokens_of.setdefault(block, beginning) == beginning
            assert blocks_of.setdefault(beginning, block) == block
    assert 100 < len(tokens_of) < sum(len(request.blocks) for request in ours)
