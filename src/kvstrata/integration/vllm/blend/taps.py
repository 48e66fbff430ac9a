"""Attention layers while the model runs: seeing their queries, replacing them, stopping behind one.

The tap is a class of its own for one implementation object: nothing of vLLM is patched, the object
is still what it was an instance of, and compiled graphs call it as ever, since to them attention
is an opaque operator.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.attention import MLAAttention

from kvstrata.core.errors import InvariantViolated

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

__all__ = ["Attend", "AttentionTaps"]

Attend = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Of a layer's number and queries to what is written into its output."""


class _StopForward(Exception):
    """The model has run as far as was asked."""


class _Absorbed(Exception):
    """Queries that MLA has multiplied with the weights that make keys of latents."""

    def __init__(self, queries: "torch.Tensor | tuple[torch.Tensor, ...]") -> None:
        self.queries = queries if isinstance(queries, torch.Tensor) else torch.cat(queries, -1)


class AttentionTaps:
    """Taps of all attention layers of a model, for the one thread that runs it."""

    def __init__(self, layers: Sequence["Attention | MLAAttention"]) -> None:
        """*layers*: all of the model's, in the order in which the model runs them."""
        self._layers = layers
        self._absorbs = False
        self._wanted: frozenset[int] = frozenset()
        self._last: int | None = None
        self._queries: dict[int, torch.Tensor] = {}
        self._attend: Attend | None = None
        for number, layer in enumerate(layers):
            if isinstance(layer, MLAAttention):
                self._tap_latents(layer.impl, number)
            else:
                self._tap(layer.impl, number)

    @contextlib.contextmanager
    def until(self, last: int, *, wanted: Collection[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Run the model in this context up to layer *last*, whose K and V it still writes.

        Yields what will hold the queries of the *wanted* layers, as attention is given them.
        """
        self._last, self._wanted, self._queries = last, frozenset(wanted), {}
        try:
            with contextlib.suppress(_StopForward):
                yield self._queries
        finally:
            self._last, self._wanted = None, frozenset()

    def multiplied(self, number: int, queries: torch.Tensor) -> torch.Tensor:
        """Some of the *queries* of a layer, as they are multiplied with what its cache keeps.

        (tokens, heads, head size); with MLA the size of the latent and what is behind it.
        """
        layer = self._layers[number]
        if isinstance(layer, MLAAttention):
            return self._absorbed(layer, queries)
        return queries.view(len(queries), -1, layer.head_size)

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

    def _absorbed(self, layer: MLAAttention, queries: torch.Tensor) -> torch.Tensor:
        """*queries* as vLLM has them in a step of decoding, whose attention is not reached."""
        count = len(queries)
        step = SimpleNamespace(
            num_actual_tokens=count,
            num_decode_tokens=count,
            num_decodes=count,
            num_prefills=0,
            decode=(),
            prefill=None,
        )
        output = queries.new_empty(count, layer.num_heads * layer.v_head_dim)
        self._absorbs = True
        try:
            layer.forward_impl(queries, queries, queries, layer.kv_cache, step, output=output)
        except _Absorbed as e:
            return e.queries
        finally:
            self._absorbs = False
        raise InvariantViolated(
            f"{layer.layer_name} does not decode with its backend's forward_mqa"
        )

    def _tap(self, impl: Any, number: int) -> None:
        base, taps = type(impl), self

        def forward(self: Any, layer: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            taps._see(number, query)
            if taps._attend is None:
                return base.forward(self, layer, query, *args, **kwargs)
            output = kwargs["output"]  # vLLM's attention operator hands it over by name
            taps._attend(number, query, output)
            return output

        impl.__class__ = type(base.__name__, (base,), {"forward": forward})

    def _tap_latents(self, impl: Any, number: int) -> None:
        """Of MLA, which prefills and decodes in two ways."""
        base, taps = type(impl), self

        def forward_mha(self: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            taps._see(number, query)
            return base.forward_mha(self, query, *args, **kwargs)

        def forward_mqa(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            if taps._absorbs:
                raise _Absorbed(query)
            return base.forward_mqa(self, query, *args, **kwargs)

        impl.__class__ = type(
            base.__name__, (base,), {"forward_mha": forward_mha, "forward_mqa": forward_mqa}
        )

    def _see(self, number: int, query: torch.Tensor) -> None:
        if number in self._wanted:
            self._queries[number] = query.clone()
        if number == self._last:
            raise _StopForward
