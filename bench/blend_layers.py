"""Which layers' attention chooses best what a model computes anew: by its own first tokens.

    python -m bench.blend_layers                                   # the shipped model
    python -m bench.blend_layers --model MODEL --prompts prompts.jsonl
    python -m bench.blend_layers --rule hkvd

A line of the file is a prompt: {"documents": [...], "question": ...}, each a text or token ids. An
engine is started for each pair of neighbouring layers; it computes each document once, elsewhere, and
then each prompt both exactly and blended (``blend_audit_share: 1``). What differs least wins.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from bench.blend.checkpoint import SHIPPED
from bench.blend.task import BOS, DOCUMENT_TOKENS, FILLER, Kind, make_prompts
from bench.own_engine import blending_engine, count, each_in_its_own_process, generate

__all__ = ["Found", "Prompt", "best", "pairs", "read_prompts", "shipped_prompts", "table"]

RULES: Final = ("two_round_query", "query", "hkvd")  # hkvd looks at the second of a pair
MOST_PAIRS: Final = 8
DOCUMENTS: Final = 6
_SAME: Final = 1.1  # divergences that differ by less are taken for equal


@dataclass(frozen=True)
class Prompt:
    """Texts, or token ids."""

    documents: list[Any]
    question: Any


@dataclass(frozen=True)
class Found:
    """What audits have found of one choice of layers."""

    layers: tuple[int, ...]
    audits: int
    same: int  # of these, where exact and blended prompts go on with the same token
    divergence: float  # of all, in nats

    @property
    def mean(self) -> float:
        return self.divergence / self.audits if self.audits else float("inf")


def pairs(layers: int) -> list[tuple[int, ...]]:
    """Neighbouring layers of the first half, ``MOST_PAIRS`` at most."""
    firsts = range(max(1, layers // 2))
    step = -(-len(firsts) // MOST_PAIRS)
    return [tuple(sorted({i, min(i + 1, layers - 1)})) for i in firsts[::step]]


def read_prompts(lines: Iterable[str]) -> list[Prompt]:
    return [Prompt(**json.loads(line)) for line in lines if line.strip()]


def shipped_prompts(count: int) -> list[Prompt]:
    """Of the task that the shipped model was trained for: questions across documents."""
    drawn = make_prompts(np.random.default_rng(7), 3 * count, DOCUMENTS, questions=1)
    chosen = np.flatnonzero(drawn.kinds[:, 0] == Kind.CROSS)[:count]
    found = []
    for tokens in drawn.tokens[chosen].tolist():
        edges = range(1, 1 + DOCUMENTS * DOCUMENT_TOKENS, DOCUMENT_TOKENS)
        documents = [tokens[first : first + DOCUMENT_TOKENS] for first in edges]
        found.append(Prompt(documents, tokens[edges[-1] + DOCUMENT_TOKENS :]))
    return found


def best(found: Sequence[Found]) -> Found:
    """Of those whose divergence is about the least the earliest, which costs least."""
    least = min(each.mean for each in found)
    return min(
        (each for each in found if each.mean <= _SAME * least), key=lambda each: each.layers[-1]
    )


def table(found: Sequence[Found]) -> Iterator[str]:
    yield "| layers | prompts | same first token | divergence, nats |"
    yield "|---|---:|---:|---:|"
    for each in found:
        layers = ", ".join(map(str, each.layers))
        yield f"| {layers} | {each.audits} | {each.same} | {each.mean:.4f} |"
    yield f"\nblend_scored_layers: {list(best(found).layers)}"


def measure(order: dict[str, Any]) -> Found:
    """Run one engine, in this process and its children."""
    from vllm import SamplingParams

    settings = {
        "tiers": "host:1GiB",
        "blend_rule": order["rule"],
        "blend_scored_layers": order["layers"],
        "blend_chunk_size": order["chunk_tokens"],
        "recompute_ratio": order["ratio"],
        "recompute": "never",
        "blend_min_saved_tokens": 0,
        "blend_min_saved_share": 0,
        "blend_audit_share": 1,
        "blend_audit_limit": 1e9,
    }
    engine = blending_engine(
        order["model"], settings, skip_tokenizer_init=order["has_ids"], **order["engine"]
    )

    def ids(text: Any) -> list[int]:
        if isinstance(text, str):
            return list(engine.get_tokenizer().encode(text, add_special_tokens=False))
        return list(text)

    one = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
    blended = one.clone()
    blended.extra_args = {"kv_transfer_params": {"blend": True}}
    before, behind = order["before"], order["behind"]
    prompts = [Prompt(**prompt) for prompt in order["prompts"]]
    teach = [[*before, *ids(d), *behind] for prompt in prompts for d in prompt.documents]
    ask = [[*before, *chain(*map(ids, p.documents)), *ids(p.question)] for p in prompts]
    generate(engine, teach, one)
    generate(engine, ask, blended)
    generate(engine, [ask[0][:8]], one)  # the last are counted

    return Found(
        tuple(order["layers"]),
        int(count("kvstrata_blend_audits_total")),
        int(count("kvstrata_blend_audits_total", result="same")),
        count("kvstrata_blend_audit_divergence_total"),
    )


def order_of(options: argparse.Namespace) -> dict[str, Any]:
    """What all engines have in common."""
    shipped = options.model is None
    if shipped:
        prompts = shipped_prompts(options.count)
    else:
        prompts = read_prompts(options.prompts.read_text(encoding="utf-8").splitlines())
    return {
        "model": str(SHIPPED if shipped else options.model),
        "prompts": [asdict(prompt) for prompt in prompts],
        "has_ids": all(
            not isinstance(text, str) for p in prompts for text in (*p.documents, p.question)
        ),
        "chunk_tokens": 16 if shipped else 64,
        "ratio": options.ratio,
        "rule": options.rule,
        "before": [BOS] if shipped else [],
        "behind": [FILLER] * 32 if shipped else [0] * 128,  # whole blocks of documents are saved
        "engine": {"max_model_len": 512, "block_size": 32} if shipped else {},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder or name; default: the shipped model")
    parser.add_argument("--prompts", type=Path, help="of a model of yours")
    parser.add_argument("--count", type=int, default=64, help="prompts of the shipped model")
    parser.add_argument("--ratio", type=float, default=0.15, help="recompute_ratio")
    parser.add_argument("--rule", default=RULES[0], choices=RULES, help="blend_rule")
    parser.add_argument("--layers", nargs="+", help="choices to try, as 3,4; default: pairs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if (options.model is None) != (options.prompts is None):
        parser.error("--model and --prompts go together")
    order = order_of(options)
    if options.layers:
        choices = [tuple(map(int, layers.split(","))) for layers in options.layers]
    else:
        choices = pairs(_layers_of(order["model"]))
    tried: list[Found] = []
    for found in each_in_its_own_process(measure, [{**order, "layers": each} for each in choices]):
        tried.append(found)
        print(f"{found.layers}: {found.mean:.4f} nats", file=sys.stderr)
    print(*table(tried), sep="\n")
    if options.json:
        text = json.dumps([asdict(each) for each in tried], indent=1) + "\n"
        options.json.write_text(text, encoding="utf-8")
    return 0


def _layers_of(model: str) -> int:
    from vllm.transformers_utils.config import get_config

    config = get_config(model, trust_remote_code=False)
    return int(getattr(config, "text_config", config).num_hidden_layers)


if __name__ == "__main__":
    sys.exit(main())
