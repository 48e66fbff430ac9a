"""What those who run a cache may ask, and the answers. Every client may, engines too."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from kvstrata.core.errors import ProtocolError
from kvstrata.core.types import BLOCK_KEY_BYTES
from kvstrata.manager.manager import KVManager
from kvstrata.manager.report import ClearReport
from kvstrata.server import protocol as p
from kvstrata.server.client_log import ClientLog
from kvstrata.server.limits import Limits
from kvstrata.server.report_size import shortened

__all__ = ["OPERATORS", "OPERATOR_QUESTIONS"]

T = TypeVar("T")
_log = logging.getLogger(__name__)

_MOST_DECISIONS: Final = 256  # of one request that are shown


class Host(Protocol):
    limits: Limits
    client_log: ClientLog

    @property
    def manager(self) -> KVManager | None: ...


class Asker(Protocol):
    """One client."""

    @property
    def host(self) -> Host: ...

    def send(self, reply: p.Reply) -> None: ...

    def tiers(self) -> KVManager:
        """Raises ``NoTiers`` if there are none yet."""
        ...

    def later(self, request: p.Request, work: Callable[[], T], answer: Callable[[T], None]) -> None:
        """Have *work* done where it may wait."""
        ...


def _stats(asker: Asker, request: p.Stats) -> None:
    host, manager = asker.host, asker.host.manager
    report = shortened(manager.stats(), host.limits) if manager else None
    asker.send(p.Report(request.seq, report))


def _explain(asker: Asker, request: p.Explain) -> None:
    manager = asker.host.manager
    found = manager.explain(request.request) if manager else []
    asker.send(p.Explained(request.seq, found[-_MOST_DECISIONS:]))


def _hottest(asker: Asker, request: p.Hottest) -> None:
    manager = asker.host.manager
    runs = manager.operator.hottest(request.runs) if manager else []
    asker.send(p.Hot(request.seq, runs))


def _prompt(asker: Asker, request: p.Prompt) -> None:
    namespace = p.checked_namespace(request.namespace)
    if len(request.last) != BLOCK_KEY_BYTES:
        raise ProtocolError(f"a key of {len(request.last)} bytes")
    keys = asker.tiers().operator.prompt(namespace, request.last)
    asker.send(p.PromptKeys(request.seq, keys.tobytes()))


def _locate(asker: Asker, request: p.Locate) -> None:
    namespace, keys = p.checked_namespace(request.namespace), p.split_keys(request.keys)
    asker.send(p.Located(request.seq, *asker.tiers().operator.locate(namespace, keys)))


def _pin(asker: Asker, request: p.Pin) -> None:
    namespace, keys = p.checked_namespace(request.namespace), p.split_keys(request.keys)
    number, blocks = asker.tiers().pin(namespace, keys, request.ttl_seconds)
    asker.send(p.Pinned(request.seq, number, blocks))


def _pin_request(asker: Asker, request: p.PinRequest) -> None:
    number, blocks = asker.tiers().pin_request(request.request, request.ttl_seconds)
    asker.send(p.Pinned(request.seq, number, blocks))


def _unpin(asker: Asker, request: p.Unpin) -> None:
    asker.send(p.Number(request.seq, int(asker.tiers().unpin(request.number))))


def _clear(asker: Asker, request: p.Clear) -> None:
    namespace = p.checked_namespace(request.namespace) if request.namespace else None
    tier = request.tier or None
    operator = asker.tiers().operator
    work = partial(operator.clear, namespace, tier, dry_run=request.dry_run)

    def answer(report: ClearReport) -> None:
        if not request.dry_run:
            asker.host.client_log.tell(
                "cleared by an operator: %s of %s; blocks: %s",
                "all tiers" if tier is None else repr(tier),
                "all namespaces" if namespace is None else f"namespace {namespace.hex()}",
                report.blocks,
            )
        asker.send(p.Cleared(request.seq, report))

    asker.later(request, work, answer)


def _drain(asker: Asker, request: p.Drain) -> None:
    def answer(_: None) -> None:
        text = "draining: no more saves are taken" if request.wanted else "saves are taken again"
        asker.host.client_log.tell("%s", text)
        asker.send(p.Number(request.seq, 0))

    asker.later(request, partial(asker.tiers().operator.drain, request.wanted), answer)


OPERATORS: Final[dict[type, Callable[[Any, Any], None]]] = {
    p.Stats: _stats,
    p.Explain: _explain,
    p.Hottest: _hottest,
    p.Prompt: _prompt,
    p.Locate: _locate,
    p.Pin: _pin,
    p.PinRequest: _pin_request,
    p.Unpin: _unpin,
    p.Clear: _clear,
    p.Drain: _drain,
}
"""Who answers what."""

OPERATOR_QUESTIONS: Final = (p.Stats, p.Hottest, p.Prompt, p.Locate)
"""What is asked for the answer alone."""
