"""Hooks for tests of real engines: those that docs/extending.md shows, and worse ones."""

import os
import re
from pathlib import Path
from typing import Any

import torch

from kvstrata.integration.vllm.hooks import AttentionHook

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"

shown: dict[str, Any] = {}
for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[:2]:
    exec(block, shown)  # noqa: S102 - code of this repository
OutputNorms: type[AttentionHook] = shown["OutputNorms"]
SilentHead: type[AttentionHook] = shown["SilentHead"]


class Rebuilt(SilentHead):  # type: ignore[valid-type,misc] # a class of the page
    """Changes each input and the output, and only in steps of which its scheduler half has told."""

    alters = "a uniform layer 0, doubled values in layer 1, a silent head in layer 2"

    def get_sparse_meta(self, scheduler_output: Any) -> object:
        return {"tokens": scheduler_output.total_num_scheduled_tokens}

    def execute_begin(self, sparse_meta: object) -> None:
        assert isinstance(sparse_meta, dict)
        self.tokens = sparse_meta["tokens"]

    def attention_begin(
        self, layer_name: str, query: torch.Tensor, key: Any, value: Any
    ) -> tuple[torch.Tensor, Any, Any]:
        assert self.tokens <= len(query) == len(key) == len(value)
        assert (query.shape[1:], key.shape[1:], value.shape[1:]) == ((8, 32), (4, 32), (4, 32))
        if ".layers.0." in layer_name:
            query = torch.zeros_like(query)
        elif ".layers.1." in layer_name:
            value = value * 2
        return query, key, value


class Failing(AttentionHook):
    """Doubles the values of every layer, until ``FAIL_WHEN`` exists: then layer 2 fails."""

    alters = "doubled values until it fails"

    def attention_begin(
        self, layer_name: str, query: torch.Tensor, key: Any, value: Any
    ) -> tuple[torch.Tensor, Any, Any]:
        if ".layers.2." in layer_name and Path(os.environ["FAIL_WHEN"]).exists():
            raise RuntimeError("no more doubling")
        return query, key, value * 2


class FailingInTheScheduler(Failing):
    """Fails in the other process."""

    alters = "doubled values until its scheduler half fails"

    def get_sparse_meta(self, scheduler_output: Any) -> object:
        if Path(os.environ["FAIL_WHEN"]).exists():
            raise RuntimeError("nothing more to say")
        return None

    def attention_begin(
        self, layer_name: str, query: torch.Tensor, key: Any, value: Any
    ) -> tuple[torch.Tensor, Any, Any]:
        return query, key, value * 2


class Liar(AttentionHook):
    """Says that it only looks."""

    def attention_finished(self, layer_name: str, output: torch.Tensor) -> torch.Tensor:
        return output.clone()


class NotAHook:
    """Has nothing of a hook."""
