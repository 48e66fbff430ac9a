"""What choosing and recomputing take of a whole prefill, timed within one engine.

    python -m bench.blend_steps              # 15 pairs
    python -m bench.blend_steps --quick      # 4
    python -m bench.blend_steps --share 0.8  # of a prompt is known, not 0.975

The prompts are the *documents* of ``blend_latency.py``: one is computed whole, and the next is blended, in
turn, by the same engine in this process. What is timed is each forward that blending runs in the model, by
its kind: those that choose (their tokens, and what is made of the attention), and those that recompute what
was chosen. On a CPU; on a GPU a call returns before its kernels have run.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from bench.blend_latency import DOCUMENTS, PROMPT_TOKENS, SHARE, new_tokens, prompt_of

from kvstrata.bench.contenders import transfer_config
from kvstrata.bench.fleet import environment
from kvstrata.bench.models import random_model, small_llama
from kvstrata.bench.session import deployment
from kvstrata.blend.selection import Recompute, Scores, Step
from kvstrata.integration.vllm.blend.scorer import Prompt, StepRunner

__all__ = ["Timed", "report"]

MOST_SHARE: Final = 0.05  # of a whole prefill, for choosing
_WARM_UP: Final = 2
_STEPS_TO_SAVE: Final = 4


class Timed:
    """Seconds of the steps that ``StepRunner`` runs, by kind, while it is in a ``with``."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._run = StepRunner.run

    def __enter__(self) -> Self:
        def run(
            runner: StepRunner, prompts: Sequence[Prompt], steps: Sequence[Step]
        ) -> list[Scores]:
            began = time.perf_counter()
            scores = self._run(runner, prompts, steps)
            kind = "recompute" if isinstance(steps[0], Recompute) else "choose"
            self.seconds[kind] += time.perf_counter() - began
            return scores

        StepRunner.run = run  # type: ignore[assignment,method-assign]  # seen from outside
        return self

    def __exit__(self, *_: object) -> None:
        StepRunner.run = self._run  # type: ignore[method-assign]


class Bench:
    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        from vllm import LLM

        shape = small_llama(layers=options.layers, hidden=options.hidden)
        model = random_model(folder / "model", True, shape)
        plan = deployment("kvstrata-blend", model, folder, model.most_tokens, 1)
        self._random = random.Random(options.seed)
        self._share = options.share
        self._engine: Any = LLM(
            model.path,
            dtype=model.dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=model.engine_block_tokens,
            max_model_len=model.most_tokens,
            num_gpu_blocks_override=plan.roomy_blocks,
            kv_transfer_config=transfer_config(plan, "cpu"),
        )

    def whole_seconds(self) -> float:
        began = time.perf_counter()
        self._ask(new_tokens(self._random, PROMPT_TOKENS), blend=False)
        return time.perf_counter() - began

    def blended_seconds(self, timed: Timed) -> dict[str, float]:
        """Of one prompt, from asked to its first token and in steps."""
        size = int(PROMPT_TOKENS * self._share) // DOCUMENTS
        documents = [new_tokens(self._random, size) for _ in range(DOCUMENTS)]
        for document in documents:
            self._ask(
                [*new_tokens(self._random, 17), *document, *new_tokens(self._random, 100)],
                blend=False,
            )
        for _ in range(_STEPS_TO_SAVE):  # saves end, and are told of, in steps of the engine
            time.sleep(0.2)
            self._ask(new_tokens(self._random, 8), blend=False)
        prompt = prompt_of(documents, PROMPT_TOKENS, self._random)
        timed.seconds.clear()
        began = time.perf_counter()
        cached = self._ask(prompt, blend=True)
        took = time.perf_counter() - began
        if cached < PROMPT_TOKENS // 2:
            raise SystemExit(f"only {cached} tokens were reused")
        return {"all": took, **timed.seconds}

    def _ask(self, prompt: list[int], *, blend: bool) -> int:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=1,
            detokenize=False,
            extra_args={"kv_transfer_params": {"blend": blend}},
        )
        (output,) = self._engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        return int(output.num_cached_tokens)


def report(whole: Sequence[float], blended: Sequence[dict[str, float]]) -> tuple[str, bool]:
    """Medians, and of shares the medians of those of each pair; whether choosing takes no more than
    is meant.
    """
    lines = ["| | ms | of a whole prefill |", "|---|---:|---:|"]
    shares = {}
    lines.append(f"| whole prefill | {1e3 * statistics.median(whole):.0f} | |")
    for kind, title in (("choose", "choosing"), ("recompute", "recomputing"), ("all", "blended")):
        shares[kind] = statistics.median(b[kind] / w for w, b in zip(whole, blended, strict=True))
        seconds = statistics.median(b[kind] for b in blended)
        lines.append(f"| {title} | {1e3 * seconds:.1f} | {shares[kind]:.3f} |")
    is_met = shares["choose"] <= MOST_SHARE
    word = "met    " if is_met else "NOT met"
    lines.append(f"\n{word} choosing takes {shares['choose']:.1%}, at most {MOST_SHARE:.0%}")
    return "\n".join(lines), is_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--quick", action="store_const", const=4, dest="pairs")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 128")
    parser.add_argument("--share", type=float, default=SHARE, help="of a prompt that is known")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ |= {**environment(None), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with tempfile.TemporaryDirectory(prefix="kvstrata-bench-") as scratch, Timed() as timed:
        bench = Bench(Path(scratch), options)
        whole, blended = [], []
        for number in range(_WARM_UP + options.pairs):
            pair = (bench.whole_seconds(), bench.blended_seconds(timed))
            if number >= _WARM_UP:
                whole.append(pair[0])
                blended.append(pair[1])
    text, is_met = report(whole, blended)
    print(text)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
