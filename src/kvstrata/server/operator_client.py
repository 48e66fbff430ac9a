"""What those who run a cache ask its server."""

from collections.abc import Callable
from typing import Any

from kvstrata.core.keys import Keys
from kvstrata.core.types import BlockKey, NamespaceId
from kvstrata.manager.decisions import Decision
from kvstrata.manager.report import CacheReport, ClearReport, RunReport
from kvstrata.server import protocol as p


class OperatorRequests:
    """The methods of ``KVManager`` and of its ``operator``, for ``ManagerClient``."""

    _ask: Callable[..., Any]  # a request and the kind of its answer, maybe how long it may take

    def stats(self) -> CacheReport | None:
        """None while no engine has told the server its block size."""
        report: CacheReport | None = self._ask(p.Stats(0), p.Report).report
        return report

    def explain(self, request: str) -> list[Decision]:
        decisions: list[Decision] = self._ask(p.Explain(0, request), p.Explained).decisions
        return decisions

    def hottest(self, runs: int) -> list[RunReport]:
        found: list[RunReport] = self._ask(p.Hottest(0, runs), p.Hot).runs
        return found

    def prompt(self, namespace: NamespaceId, last: BlockKey) -> Keys:
        return p.split_keys(self._ask(p.Prompt(0, namespace, last), p.PromptKeys).keys)

    def locate(self, namespace: NamespaceId, keys: Keys) -> tuple[int, int]:
        reply = self._ask(p.Locate(0, namespace, p.join_keys(keys)), p.Located)
        return reply.host_blocks, reply.local_blocks

    def pin(self, namespace: NamespaceId, keys: Keys, ttl_seconds: float) -> tuple[int, int]:
        reply = self._ask(p.Pin(0, namespace, p.join_keys(keys), ttl_seconds), p.Pinned)
        return reply.number, reply.blocks

    def pin_request(self, request: str, ttl_seconds: float) -> tuple[int, int]:
        reply = self._ask(p.PinRequest(0, request, ttl_seconds), p.Pinned)
        return reply.number, reply.blocks

    def unpin(self, number: int) -> bool:
        return bool(self._ask(p.Unpin(0, number), p.Number).value)

    def clear(
        self, namespace: NamespaceId | None, tier: str | None, *, dry_run: bool = False
    ) -> ClearReport:
        reply = self._ask(p.Clear(0, namespace or b"", tier or "", dry_run), p.Cleared)
        report: ClearReport = reply.report
        return report

    def drain(self, wanted: bool) -> None:
        self._ask(p.Drain(0, wanted), p.Number)
