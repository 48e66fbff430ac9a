"""Prompts that the page has brought up into host memory: one order at a time."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from kvstrata.core.errors import KVStrataError, LimitExceeded
from kvstrata.core.keys import Keys
from kvstrata.core.types import NamespaceId
from kvstrata.server.client import observe
from kvstrata.server.warming import Warmed, warm

__all__ = ["WarmState", "Warmer"]

_ANSWER_SECONDS: Final = 5.0


class WarmState(msgspec.Struct, frozen=True):
    """Of the prompts that are brought up, or were last."""

    namespace: str
    name: str  # of a file, or the key of a prompt's last block
    prompts: int
    ended_prompts: int
    host_blocks: int  # of all prompts together
    asked_blocks: int
    is_over: bool
    problem: str | None = None


class Warmer:
    """``state`` is thread-safe, and so is ``begin``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._order = threading.Lock()  # held from the beginning of an order to its end
        self._state: WarmState | None = None

    @property
    def state(self) -> WarmState | None:
        return self._state

    def begin(
        self, namespace: NamespaceId, name: str, find: Callable[[], Sequence[Keys]]
    ) -> Future[WarmState]:
        """Bring up the prompts that *find* returns; it may take its time.

        The future is done when they are found. What *find* raises becomes the future's, and leaves
        ``state`` as it was. ``LimitExceeded`` while another order is carried out.
        """
        if not self._order.acquire(blocking=False):
            raise LimitExceeded("other prompts are being brought up", hint="wait for their end")
        found: Future[WarmState] = Future()
        found.set_running_or_notify_cancel()
        threading.Thread(
            target=self._run, args=[namespace, name, find, found], name="kvstrata-warm", daemon=True
        ).start()
        return found

    def _run(
        self,
        namespace: NamespaceId,
        name: str,
        find: Callable[[], Sequence[Keys]],
        found: Future[WarmState],
    ) -> None:
        try:
            prompts = find()
        except BaseException as e:  # noqa: BLE001 - the thread's top: raised where it is waited for
            self._order.release()
            found.set_exception(e)
            return
        asked = sum(len(keys) for keys in prompts)
        self._state = WarmState(namespace.hex(), name, len(prompts), 0, 0, asked, is_over=False)
        found.set_result(self._state)
        problem: str | None = "a bug: see the log of the page"
        try:
            self._bring_up(namespace, prompts, self._state)
            problem = None
        except KVStrataError as e:
            problem = str(e)
        finally:
            self._state = msgspec.structs.replace(self._state, is_over=True, problem=problem)
            self._order.release()

    def _bring_up(self, namespace: NamespaceId, prompts: Sequence[Keys], state: WarmState) -> None:
        def progress(warmed: Warmed) -> None:
            self._state = _with(state, warmed, ended=0)

        with closing(observe(self._path, timeout_seconds=_ANSWER_SECONDS)) as client:
            for keys in prompts:
                state = _with(state, warm(client, namespace, keys, progress), ended=1)
                self._state = state


def _with(state: WarmState, warmed: Warmed, *, ended: int) -> WarmState:
    """*state* of the prompts before, and what has become of the next."""
    return msgspec.structs.replace(
        state,
        host_blocks=state.host_blocks + warmed.host_blocks,
        ended_prompts=state.ended_prompts + ended,
    )
