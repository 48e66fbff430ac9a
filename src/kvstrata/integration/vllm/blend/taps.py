"""Attention layers while the model runs: seeing their queries, replacing them, stopping behind one.

The tap is a class of its own for one implementation object: nothing of vLLM is patched, the object
is still what it was an instance of, and compiled graphs call it as ever, since to them attention
is an opaque operator.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionImpl

__all__ = ["Attend", "AttentionTaps"]

Attend = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Of a layer's number and queries to what is written into its output."""


class _StopForward(Exception):
    """The model has run as far as was asked."""


class AttentionTaps:
    """Taps of all attention layers of a model, for the one thread that runs it."""

    def __init__(self, layers: Sequence["Attention"]) -> None:
        """*layers*: all of the model's, in the order in which the model runs them."""
        self._wanted: frozenset[int] = frozenset()
        self._last: int | None = None
        self._queries: dict[int, torch.Tensor] = {}
        self._attend: Attend | None = None
        for number, layer in enumerate(layers):
            self._tap(layer.impl, number)

    @contextlib.contextmanager
    def until(self, last: int, *, wanted: Collection[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Run the model in this context up to layer *last*, whose K and V it still writes.

        Yields what will hold the queries of the *wanted* layers, each (tokens, heads, head size).
        """
        self._last, self._wanted, self._queries = last, frozenset(wanted), {}
        try:
            with contextlib.suppress(_StopForward):
                yield self._queries
        finally:
            self._last, self._wanted = None, frozenset()

    @contextlib.contextmanager
    def attending(self, attend: Attend) -> Iterator[None]:
        """Run the model in this context with *attend* in the place of every layer's attention.

        Its K and V have been written by then.
        """
        self._attend = attend
        try:
            yield
        finally:
            self._attend = None

    def _tap(self, impl: "AttentionImpl", number: int) -> None:
        base, taps = type(impl), self

        def forward(self: Any, layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            taps._see(number, query)
            if taps._attend is None:
                return base.forward(self, layer, query, *args, **kwargs)
            output = kwargs["output"]  # vLLM's attention operator hands it over by name
            taps._attend(number, query, output)
            return output

        impl.__class__ = type(base.__name__, (base,), {"forward": forward})

    def _see(self, number: int, query: torch.Tensor) -> None:
        if number in self._wanted:
            self._queries[number] = query.clone()
        if number == self._last:
            raise _StopForward
