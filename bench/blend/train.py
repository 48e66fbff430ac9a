"""Trains the model that bench/blend_quality.py asks, on one CPU thread in less than 15 minutes.

    python -m bench.blend.train --out FOLDER [--seed N] [--steps N]

The same seed, steps and version of torch give the same model. Beside the model, ``training.json``
says how it was made.
"""

import argparse
import datetime
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from bench.blend.checkpoint import save_model
from bench.blend.model import Llama, Shape
from bench.blend.muon import Muon
from bench.blend.task import (
    ANSWERS,
    NO_TARGET,
    STATEMENT,
    TERMS,
    VARIABLES,
    VOCABULARY,
    Kind,
    make_prompts,
)
from numpy.typing import NDArray
from torch import nn

STEPS: Final = 2000
TRAINING_QUESTIONS: Final = 16
PEAK_RATE: Final = 2.5e-3
MATRIX_RATE: Final = 6e-3
WEIGHT_DECAY: Final = 0.01
WARM_UP_STEPS: Final = 60
DECAY_FROM: Final = 0.4  # of all steps, linearly to FINAL_SHARE of the peak
FINAL_SHARE: Final = 0.02
MEMORY: Final = 0.95  # of the running accuracies, for each step
LEARNT: Final = 0.85  # accuracy of every kind of question that ends a stage
FEWER_DOCUMENTS_SHARE: Final = 0.25  # of the last stage's steps


class Stage(NamedTuple):
    documents: int
    max_hops: int
    prompts: int  # of a step


CURRICULUM: Final = (Stage(1, 0, 64), Stage(2, 1, 40), Stage(4, 2, 24), Stage(6, 2, 16))
FEWER_DOCUMENTS_PROMPTS: Final = 24


class FactoredEmbedding(nn.Module):
    """A statement's embedding is that of its variable plus that of its term.

    960 statements are then learnt from all prompts that have one of 24 variables or 40 terms.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.other = nn.Parameter(0.5 * torch.randn(STATEMENT, hidden))
        self.variable = nn.Parameter(0.5 * torch.randn(VARIABLES, 1, hidden))
        self.term = nn.Parameter(0.5 * torch.randn(1, TERMS, hidden))

    def table(self) -> torch.Tensor:
        """As a plain embedding: (VOCABULARY, hidden)."""
        return torch.cat((self.other, (self.variable + self.term).flatten(0, 1)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.table())


class Progress:
    """Running accuracy of each kind of question since the stage began."""

    def __init__(self) -> None:
        self.accuracy: dict[Kind, float] = {}

    def take(self, right: NDArray[np.bool_], kinds: NDArray[np.int64]) -> None:
        """Both (prompts, questions)."""
        for kind in Kind:
            of_kind = right[kinds == kind]
            if len(of_kind):
                now = float(of_kind.mean())
                before = self.accuracy.get(kind, now)
                self.accuracy[kind] = MEMORY * before + (1 - MEMORY) * now

    def learnt(self, stage: Stage) -> bool:
        asked = Kind if stage.max_hops else (Kind.LOCAL,)
        return min(self.accuracy.get(kind, 0.0) for kind in asked) > LEARNT

    def __str__(self) -> str:
        return "  ".join(f"{kind.name.lower()} {of:.3f}" for kind, of in self.accuracy.items())


class Optimizer:
    """Muon for the matrices of the layers, AdamW for all else."""

    def __init__(self, model: Llama) -> None:
        self._weights = dict(model.named_parameters())
        matrices = [name for name, w in self._weights.items() if ".layers." in name and w.ndim == 2]
        self._muon = Muon([self._weights[name] for name in matrices], decay=WEIGHT_DECAY)
        rest = [w for name, w in self._weights.items() if name not in matrices]
        self._adam = torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)

    def step(self, share: float) -> None:
        """Take a step with that *share* of the peak rates; the gradients are used up."""
        weights = list(self._weights.values())
        nn.utils.clip_grad_norm_(weights, 1.0)
        self._muon.step(share * MATRIX_RATE)
        for group in self._adam.param_groups:
            group["lr"] = share * PEAK_RATE
        self._adam.step()
        for weight in weights:
            weight.grad = None


def rate(step: int, steps: int) -> float:
    """Share of the peak rates: up, level, down."""
    decay = max(FINAL_SHARE, (1 - step / steps) / (1 - DECAY_FROM))
    return min(1.0, step / WARM_UP_STEPS, decay)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the whole vocabulary, where tokens that are no answer have a logit of 0.

    *logits*: (targets, answers).
    """
    others = torch.full_like(logits[:, :1], math.log(VOCABULARY - ANSWERS))
    return F.cross_entropy(torch.cat((logits, others), 1), targets)


def train(seed: int, steps: int) -> tuple[Llama, Progress]:
    """Return the model with a plain embedding, and how well it did in the end."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    shape = Shape(vocabulary=VOCABULARY, answers=ANSWERS)
    embedding = FactoredEmbedding(shape.hidden)
    model = Llama(shape, embedding)
    model.initialize()
    print(f"{sum(weight.numel() for weight in model.parameters())} parameters", flush=True)
    optimizer = Optimizer(model)
    number, progress = 0, Progress()
    for step in range(1, steps + 1):
        loss, right, kinds = drawn_loss(model, rng, CURRICULUM[number])
        progress.take(right, kinds)
        loss.backward()
        optimizer.step(rate(step, steps))
        if step % 50 == 0:
            print(
                f"{time.process_time():4.0f} s  step {step}  stage {number}  {progress}", flush=True
            )
        if step % 10 == 0 and number < len(CURRICULUM) - 1 and progress.learnt(CURRICULUM[number]):
            number, progress = number + 1, Progress()
    return with_plain_embedding(model, embedding), progress


def drawn_loss(
    model: Llama, rng: np.random.Generator, stage: Stage
) -> tuple[torch.Tensor, NDArray[np.bool_], NDArray[np.int64]]:
    """Loss of freshly drawn prompts; of each question whether it was right, and its kind."""
    documents, max_hops, prompts = stage
    if stage is CURRICULUM[-1] and rng.random() < FEWER_DOCUMENTS_SHARE:
        documents, prompts = int(rng.integers(2, documents)), FEWER_DOCUMENTS_PROMPTS
    drawn = make_prompts(rng, prompts, documents, max_hops=max_hops, questions=TRAINING_QUESTIONS)
    asked = drawn.targets != NO_TARGET
    targets = torch.from_numpy(drawn.targets[asked])
    logits = model.logits(model.states(torch.from_numpy(drawn.tokens))[torch.from_numpy(asked)])
    right = np.zeros(asked.shape, np.bool_)
    right[asked] = (logits.argmax(-1) == targets).numpy()
    return loss_of(logits, targets), right[:, -TRAINING_QUESTIONS:], drawn.kinds


def with_plain_embedding(model: Llama, embedding: FactoredEmbedding) -> Llama:
    state = model.state_dict()
    for name in embedding.state_dict():
        del state[f"model.embed_tokens.{name}"]
    plain = Llama(model.shape)
    plain.load_state_dict(state | {"model.embed_tokens.weight": embedding.table()})
    return plain


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, progress = train(options.seed, options.steps)
    save_model(model, options.out)
    made: dict[str, Any] = {
        "command": f"python -m bench.blend.train --seed {options.seed} --steps {options.steps}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "cpu_seconds": round(time.process_time()),
        "running_accuracy": {k.name.lower(): round(v, 4) for k, v in progress.accuracy.items()},
    }
    text = json.dumps(made, indent=2) + "\n"
    (options.out / "training.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
