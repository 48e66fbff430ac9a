"""What the page may do to a server, where that is allowed. Each verb has a connection of its own."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from kvstrata.core.errors import ConfigError
from kvstrata.core.keys import Keys
from kvstrata.core.types import BLOCK_KEY_BYTES, NAMESPACE_ID_BYTES
from kvstrata.server.client import ManagerClient, observe
from kvstrata.server.page.warmer import Warmer, WarmState

__all__ = ["VERBS", "ReadPrompts", "Verbs", "WarmFile"]

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


class WarmFile(msgspec.Struct, forbid_unknown_fields=True):
    """Begin to bring the prompts of a file up into host memory, once all of it is read. The fields
    stand in the query, and the body is the file.
    """

    namespace: _Namespace
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


ReadPrompts = Callable[[bytes, str, Mapping[str, str]], Sequence[Keys]]
"""Keys of the prompts of a file: what it holds, its name, and the parts of the namespace."""


class Verbs:
    """Blocking; for any thread. Raises errors of ours."""

    def __init__(self, path: Path, read_prompts: ReadPrompts) -> None:
        self._path = path
        self._read_prompts = read_prompts
        self._warmer = Warmer(path)

    @property
    def warming(self) -> WarmState | None:
        return self._warmer.state

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

    def warm_file(self, query: Mapping[str, str], content: bytes) -> Future[WarmState]:
        """Does not block: the future is done when the file is read, or says what is wrong in it."""
        try:
            order = msgspec.convert(query, WarmFile)
        except msgspec.MsgspecError as e:
            raise ConfigError(f"warm-file: {e}") from e
        _log.info("by the page: %s", order)

        def find() -> Sequence[Keys]:
            with self._asking() as client:
                report = client.stats()
            known = {each.namespace: each.parts for each in report.namespaces} if report else {}
            return self._read_prompts(content, order.name, known.get(order.namespace, {}))

        return self._warmer.begin(bytes.fromhex(order.namespace), order.name, find)

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
        namespace, last = bytes.fromhex(order.namespace), bytes.fromhex(order.last_block)

        def find() -> list[Keys]:
            with self._asking() as client:
                return [client.prompt(namespace, last)]

        self._warmer.begin(namespace, order.last_block, find).result()
        return {}

    def _asking(self) -> "closing[ManagerClient]":
        return closing(observe(self._path, timeout_seconds=_ANSWER_SECONDS))


VERBS: Final[dict[str, tuple[Any, Callable[[Verbs, Any], dict[str, Any]]]]] = {
    "clear": (Clear, Verbs._clear),
    "pin": (Pin, Verbs._pin),
    "unpin": (Unpin, Verbs._unpin),
    "warm": (Warm, Verbs._warm),
    "drain": (Drain, Verbs._drain),
}
