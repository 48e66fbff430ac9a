"""What the page may do to a server, where that is allowed. Each verb has a connection of its own."""

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvstrata.core.errors import ConfigError, KVStrataError, LimitExceeded
from kvstrata.core.types import BLOCK_KEY_BYTES, NAMESPACE_ID_BYTES
from kvstrata.server.client import ManagerClient, observe
from kvstrata.server.warming import Warmed, warm

__all__ = ["VERBS", "Verbs", "WarmState"]

_log = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 5.0
_LONG_SECONDS: Final = 300.0  # to clear a large disk

_Namespace = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * NAMESPACE_ID_BYTES}}}$")]
_Key = Annotated[str, msgspec.Meta(pattern=f"^[0-9a-f]{{{2 * BLOCK_KEY_BYTES}}}$")]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class Clear(msgspec.Struct, forbid_unknown_fields=True):
    """Give up blocks of a namespace, or of all; in a tier, or in all. ``dry_run`` counts alone."""

    namespace: _Namespace | None
    tier: Annotated[str, msgspec.Meta(max_length=256)] | None
    dry_run: bool


class Pin(msgspec.Struct, forbid_unknown_fields=True):
    """Keep the prompt that ``last_block`` ends from leaving for a time."""

    namespace: _Namespace
    last_block: _Key
    ttl_seconds: _Seconds


class Unpin(msgspec.Struct, forbid_unknown_fields=True):
    """End a pin before its time."""

    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class Warm(msgspec.Struct, forbid_unknown_fields=True):
    """Begin to bring a prompt up into host memory; ``/api/state`` tells how far it is."""

    namespace: _Namespace
    last_block: _Key


class Drain(msgspec.Struct, forbid_unknown_fields=True):
    """Get the server ready to be stopped, or, with false, take that back."""

    wanted: bool


class WarmState(msgspec.Struct, frozen=True):
    """Of the prompt that is brought up, or was last."""

    last_block: str
    host_blocks: int
    asked_blocks: int
    is_over: bool
    problem: str | None = None


class Verbs:
    """Blocking; for any thread. Raises errors of ours."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # guards the next
        self._warming: WarmState | None = None

    @property
    def warming(self) -> WarmState | None:
        return self._warming

    def carry_out(self, verb: str, body: bytes) -> dict[str, Any]:
        """Do *verb* as *body* says; what came of it. ``ConfigError`` names what is wrong."""
        kind, act = VERBS.get(verb, (None, None))
        if kind is None or act is None:
            raise ConfigError(f"no verb {verb[:40]!r}", hint=f"there are {', '.join(VERBS)}")
        try:
            order = msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as e:
            raise ConfigError(f"{verb}: {e}") from e
        _log.info("by the page: %s", order)
        return act(self, order)

    def _clear(self, order: Clear) -> dict[str, Any]:
        namespace = bytes.fromhex(order.namespace) if order.namespace else None
        with closing(observe(self._path, timeout_seconds=_LONG_SECONDS)) as client:
            report = client.clear(namespace, order.tier, dry_run=order.dry_run)
        return {"report": msgspec.to_builtins(report)}

    def _pin(self, order: Pin) -> dict[str, Any]:
        namespace, last = bytes.fromhex(order.namespace), bytes.fromhex(order.last_block)
        with self._asking() as client:
            keys = client.prompt(namespace, last)
            number, blocks = client.pin(namespace, keys, order.ttl_seconds)
        return {"number": number, "blocks": blocks}

    def _unpin(self, order: Unpin) -> dict[str, Any]:
        with self._asking() as client:
            return {"was_there": client.unpin(order.number)}

    def _drain(self, order: Drain) -> dict[str, Any]:
        with closing(observe(self._path, timeout_seconds=_LONG_SECONDS)) as client:
            client.drain(order.wanted)
        return {}

    def _warm(self, order: Warm) -> dict[str, Any]:
        """Begin; ``warming`` tells how far it is. One prompt at a time."""
        with self._lock:
            if self._warming is not None and not self._warming.is_over:
                raise LimitExceeded("another prompt is being brought up", hint="wait for its end")
            self._warming = WarmState(order.last_block, 0, 0, is_over=False)
        threading.Thread(
            target=self._bring_up, args=[order], name="kvstrata-warm", daemon=True
        ).start()
        return {}

    def _bring_up(self, order: Warm) -> None:
        state = WarmState(order.last_block, 0, 0, is_over=False)

        def progress(warmed: Warmed) -> None:
            nonlocal state
            state = WarmState(
                order.last_block, warmed.host_blocks, warmed.asked_blocks, is_over=False
            )
            self._warming = state

        problem: str | None = "a bug: see the log of the page"
        try:
            namespace = bytes.fromhex(order.namespace)
            with self._asking() as client:
                keys = client.prompt(namespace, bytes.fromhex(order.last_block))
                warm(client, namespace, keys, progress)
            problem = None
        except KVStrataError as e:
            problem = str(e)
        finally:
            self._warming = msgspec.structs.replace(state, is_over=True, problem=problem)

    def _asking(self) -> "closing[ManagerClient]":
        return closing(observe(self._path, timeout_seconds=_ANSWER_SECONDS))


VERBS: Final[dict[str, tuple[Any, Callable[[Verbs, Any], dict[str, Any]]]]] = {
    "clear": (Clear, Verbs._clear),
    "pin": (Pin, Verbs._pin),
    "unpin": (Unpin, Verbs._unpin),
    "warm": (Warm, Verbs._warm),
    "drain": (Drain, Verbs._drain),
}
