"""Attention hooks: code of others that sees, and may change, what each attention layer is given.

``AttentionHook`` is what they write, ``HookedLayers`` runs one in a worker. It sits in PyTorch's own
hooks of the layers of one model: nothing of vLLM is patched, and ``remove`` leaves no trace. A hook
that raises is switched off with one line in the log, and the engine goes on without it.
"""

import importlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from kvstrata.core.errors import ConfigError

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["AttentionHook", "HookedLayers", "load_hook"]

_log = logging.getLogger(__name__)

_PARAMETERS: Final = ("query", "key", "value", "output_shape", "output_dtype")

Attended = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class AttentionHook:
    """Does nothing; override what you need. docs/extending.md says when each method is called.

    One object lives in the scheduler's process, for ``get_sparse_meta``, and one in each worker, for
    all else. Tensors are never changed in place: a method returns them, or others of the same
    shape, type and device.
    """

    alters: ClassVar[str | None] = None
    """What this hook makes of attention, in words that no other hook uses. None: it only looks."""

    def get_sparse_meta(self, scheduler_output: "SchedulerOutput") -> object:
        """In the scheduler, once a step: whatever the workers should know. It is pickled."""

    def execute_begin(self, sparse_meta: object) -> None:
        """Before a step's forward, with what ``get_sparse_meta`` has returned for it."""

    def attention_begin(
        self,
        layer_name: str,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> Attended:
        """Before attention: query ``(tokens, heads, head_size)``, key and value ``(tokens, kv heads, …)``.

        What is returned as key and value is written to the KV cache. They are None in a layer that
        uses the cache of another.
        """
        return query, key, value

    def attention_finished(self, layer_name: str, output: torch.Tensor) -> torch.Tensor:
        """After attention: output ``(tokens, heads, head_size)``, before its projection."""
        return output

    def execute_finished(self) -> None:
        """After a step's forward."""


def load_hook(name: str) -> type[AttentionHook]:
    """Return the class that ``package.module:Class`` names; anything else is a ``ConfigError``."""
    module, _, kind = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), kind)
    except Exception as e:
        raise ConfigError(
            f"attention_hook {name!r} cannot be loaded: {type(e).__name__}: {e}",
            hint="give package.module:Class, of a module that vLLM's processes can import",
        ) from e
    if not isinstance(found, type) or not issubclass(found, AttentionHook):
        raise ConfigError(
            f"attention_hook {name!r} is no subclass of AttentionHook",
            hint="derive the class from kvstrata.integration.vllm.hooks.AttentionHook",
        )
    return found


class HookedLayers:
    """The attention layers of one worker's model, with a hook in each.

    The hook is called between ``begin`` and ``end`` only, so neither when vLLM tries out shapes nor
    in a step that computes nothing. ``failed`` is True for good once it has raised, or returned
    what does not fit; that call then changes nothing.
    """

    def __init__(self, hook: AttentionHook, layers: Mapping[str, torch.nn.Module]) -> None:
        self.failed = False
        self._hook = hook
        self._runs = False
        self._handles = [
            handle
            for name, layer in layers.items()
            for handle in (
                layer.register_forward_pre_hook(partial(self._before, name), with_kwargs=True),
                layer.register_forward_hook(partial(self._after, name)),
            )
        ]

    @property
    def spoils(self) -> bool:
        """Whether this step's KV is neither what the hook makes nor what the model makes."""
        return self.failed and self._hook.alters is not None

    def begin(self, sparse_meta: object) -> None:
        """A step begins in which the hook is wanted."""
        if self.failed:
            return
        self._runs = True
        try:
            self._hook.execute_begin(sparse_meta)
        except Exception as e:  # noqa: BLE001 - plugin: its failure must not end the engine
            self._give_up("execute_begin", e)

    def end(self) -> None:
        """The step's forward is over. Does nothing without a ``begin``."""
        if not self._runs:
            return
        self._runs = False
        try:
            self._hook.execute_finished()
        except Exception as e:  # noqa: BLE001 - plugin: its failure must not end the engine
            self._give_up("execute_finished", e)

    def remove(self) -> None:
        """Take the hook out of every layer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(
        self, name: str, layer: "Attention", arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        if not self._runs:
            return None
        call = dict(zip(_PARAMETERS, arguments, strict=False)) | named
        try:
            shown = (
                call["query"].view(-1, layer.num_heads, layer.head_size),
                _view(call["key"], layer.num_kv_heads, layer.head_size),
                _view(call["value"], layer.num_kv_heads, layer.head_size_v),
            )
            returned = self._hook.attention_begin(name, *shown)
            for what, old, new in zip(_PARAMETERS[:3], shown, returned, strict=True):
                call[what] = self._taken(what, old, new, call[what])
        except Exception as e:  # noqa: BLE001 - plugin: its failure must not end the engine
            self._give_up(f"attention_begin of {name}", e)
            return None
        return (), call

    def _after(
        self, name: str, layer: "Attention", arguments: tuple[Any, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        if not self._runs:
            return None
        try:
            shown = output.view(-1, layer.num_heads, layer.head_size_v)
            returned = self._hook.attention_finished(name, shown)
            return self._taken("output", shown, returned, output)
        except Exception as e:  # noqa: BLE001 - plugin: its failure must not end the engine
            self._give_up(f"attention_finished of {name}", e)
            return None

    def _taken(
        self, what: str, shown: torch.Tensor | None, returned: Any, given: torch.Tensor | None
    ) -> torch.Tensor | None:
        """*returned* in the shape of *given*, or *given* itself where nothing was changed."""
        if returned is shown:
            return given
        if self._hook.alters is None:
            raise TypeError(f"another {what} was returned by a hook whose `alters` is None")
        if shown is None or given is None:
            raise TypeError(f"a {what} was returned where there is none")
        if _form(returned) != _form(shown):
            raise TypeError(f"{what} is {_form(returned)} where {_form(shown)} was given")
        changed: torch.Tensor = returned.reshape(given.shape)
        return changed

    def _give_up(self, where: str, error: Exception) -> None:
        self.failed, self._runs = True, False
        _log.error(
            "the attention hook %s is switched off for good, it failed in %s",
            type(self._hook).__qualname__,
            where,
            exc_info=error,
        )


def _view(tensor: torch.Tensor | None, heads: int, head_size: int) -> torch.Tensor | None:
    return None if tensor is None else tensor.view(-1, heads, head_size)


def _form(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"
