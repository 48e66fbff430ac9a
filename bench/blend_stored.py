"""What blending stores of documents that come again in any order, and what it reuses, in an engine.

    python -m bench.blend_stored                # two engines after each other, a minute each
    python -m bench.blend_stored --prompts 8 4  # fewer prompts, with no bounds

Exits with 1 if a bound is missed. See bench/README.md for what is measured.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.blend_match import (
    DONORS,
    LEAST_COVERAGE,
    MOST_STORED,
    TARGETS,
    VOCABULARY,
    Bed,
    Documents,
)
from bench.own_engine import blending_engine, count, each_in_its_own_process, generate

from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

__all__ = ["Kept", "bounds", "table"]

BLOCK_TOKENS: Final = 32  # of vLLM's CPU backend, and so of what is stored
MODEL_TOKENS: Final = 32_768
MODEL: Final = TinyLlama(
    hidden_size=64,
    intermediate_size=128,
    layers=2,
    heads=2,
    kv_heads=1,
    vocab_size=VOCABULARY,
    max_position=MODEL_TOKENS,
    dtype="float32",
)
SETTINGS: Final = {
    "tiers": "host:2GiB",
    "blend": "all",
    "blend_if_slower": True,
    "blend_audit_share": 0,
    "recompute_ratio": 0,
    "tokens_per_block": BLOCK_TOKENS,
}


@dataclass(frozen=True)
class Kept:
    """Of one engine. Stored are all tokens of all blocks, over those of the documents."""

    blend_again: bool
    stored_at_first: float  # behind the first prompts
    stored: float  # behind all of them
    coverage: float  # reused tokens over the documents' tokens in the later prompts
    blended: int  # of the later prompts

    def row(self) -> str:
        again = "`blend_again`" if self.blend_again else "as it comes"
        return (
            f"| {again} | {self.stored_at_first:.2f} | {self.stored:.2f} | {self.coverage:.3f} "
            f"| {self.blended} |"
        )


def table(found: Sequence[Kept]) -> Iterator[str]:
    yield "| | stored after the first prompts | after all | coverage | blended |"
    yield "|---|---:|---:|---:|---:|"
    yield from (each.row() for each in found)


def bounds(kept: Kept) -> Iterator[str]:
    """What *kept* misses."""
    if kept.coverage < LEAST_COVERAGE:
        yield f"coverage of {kept.coverage:.3f} is less than {LEAST_COVERAGE}"
    if kept.stored > MOST_STORED:
        yield f"{kept.stored:.2f} of the documents' tokens are stored, more than {MOST_STORED}"


def measure(model: str, blend_again: bool, prompts: tuple[int, int]) -> Kept:
    """Run one engine, in this process and its children."""
    from vllm import SamplingParams

    engine = blending_engine(
        model,
        SETTINGS | {"blend_again": blend_again},
        dtype=MODEL.dtype,
        skip_tokenizer_init=True,
        block_size=BLOCK_TOKENS,
        max_model_len=MODEL_TOKENS,
        num_gpu_blocks_override=2 * MODEL_TOKENS // BLOCK_TOKENS,
        gpu_memory_utilization=0.05,
        max_num_seqs=1,
    )
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)

    def counts() -> tuple[float, float, float]:
        """Stored and reused tokens, and blended prompts."""
        generate(engine, [[1, 2, 3]], one)  # the last are counted
        return (
            BLOCK_TOKENS * count("kvstrata_saved_blocks_total"),
            count("kvstrata_blend_tokens_total", kind="reused"),
            count("kvstrata_blend_requests_total", result="blended"),
        )

    work = Documents(Bed(MODEL_TOKENS))
    unique = sum(map(len, work.documents))
    first, later = prompts
    for _ in range(first):
        generate(engine, [work.prompt()[0].tolist()], one)
    stored_at_first, reused_before, blended_before = counts()
    wanted = 0
    for _ in range(later):
        tokens, is_document = work.prompt()
        wanted += int(is_document.sum())
        generate(engine, [tokens.tolist()], one)
    stored, reused, blended = counts()
    return Kept(
        blend_again,
        stored_at_first / unique,
        stored / unique,
        (reused - reused_before) / wanted,
        int(blended - blended_before),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--prompts",
        type=int,
        nargs=2,
        default=(DONORS, TARGETS),
        help="the first, and the later ones",
    )
    options = parser.parse_args()
    # It warns of each reset that waits for saves.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder:
        write_tiny_llama(Path(folder), MODEL)
        prompts = tuple(options.prompts)
        found = [*each_in_its_own_process(measure, [folder] * 2, [False, True], [prompts] * 2)]
    print(*table(found), sep="\n")
    if prompts != (DONORS, TARGETS):
        return 0  # of fewer prompts few documents have been seen
    missed = [*bounds(found[-1])]
    print("\nbounds NOT met:" if missed else "\nall bounds met", *missed, sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
