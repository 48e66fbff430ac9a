"""What blending stores of documents that come again in any order, and what it reuses, in an engine.

    python -m bench.blend_stored                # two engines after each other, a minute each
    python -m bench.blend_stored --prompts 8 4  # fewer prompts, with no bounds

Exits with 1 if a bound is missed. See bench/README.md for what is measured.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.blend_match import (
    DONORS,
    LEAST_COVERAGE,
    MOST_STORED,
    TARGETS,
    VOCABULARY,
    Bed,
    Documents,
)

from kvstrata.bench.fleet import environment
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
    "lookup_timeout_seconds": 30,  # nothing is timed
    "load_timeout_seconds": 30,
    "save_timeout_seconds": 30,
}
# In which the metrics are, and without its warnings of prefix caches that wait for saves.
_IN_ONE_PROCESS: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}


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
    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype=MODEL.dtype,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=MODEL_TOKENS,
        num_gpu_blocks_override=2 * MODEL_TOKENS // BLOCK_TOKENS,
        gpu_memory_utilization=0.05,
        max_num_seqs=1,
        kv_transfer_config={
            "kv_connector": "BlendConnector",
            "kv_connector_module_path": "kvstrata.integration.vllm.blend.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": SETTINGS
            | {"tokens_per_block": BLOCK_TOKENS, "blend_again": blend_again},
        },
    )
    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)

    def ask(tokens: list[int]) -> None:
        engine.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)
        while not engine.reset_prefix_cache():  # refused while saves hold blocks
            engine.generate([{"prompt_token_ids": [1, 2, 3]}], one, use_tqdm=False)

    def count(name: str, **labels: str) -> float:
        samples = [s for family in REGISTRY.collect() for s in family.samples if s.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def counts() -> tuple[float, float, float]:
        """Stored and reused tokens, and blended prompts."""
        ask([1, 2, 3])  # the last are counted
        return (
            BLOCK_TOKENS * count("kvstrata_saved_blocks_total"),
            count("kvstrata_blend_tokens_total", kind="reused"),
            count("kvstrata_blend_requests_total", result="blended"),
        )

    work = Documents(Bed(MODEL_TOKENS))
    unique = sum(map(len, work.documents))
    first, later = prompts
    for _ in range(first):
        ask(work.prompt()[0].tolist())
    stored_at_first, reused_before, blended_before = counts()
    wanted = 0
    for _ in range(later):
        tokens, is_document = work.prompt()
        wanted += int(is_document.sum())
        ask(tokens.tolist())
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
    os.environ.update(environment(None) | _IN_ONE_PROCESS)
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as folder:
        write_tiny_llama(Path(folder), MODEL)
        asked: list[Any] = [(folder, again, tuple(options.prompts)) for again in (False, True)]
        # A process for each: vLLM keeps one engine's metrics for as long as its process lives.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
            found = [*processes.map(measure, *zip(*asked, strict=True))]
    print(*table(found), sep="\n")
    if tuple(options.prompts) != (DONORS, TARGETS):
        return 0  # of fewer prompts few documents have been seen
    missed = [*bounds(found[-1])]
    print("\nbounds NOT met:" if missed else "\nall bounds met", *missed, sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
