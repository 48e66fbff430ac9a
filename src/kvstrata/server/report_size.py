"""Reports that fit into an answer."""

import heapq

from kvstrata.manager.report import CacheReport, NamespaceReport
from kvstrata.server.limits import Limits


def shortened(report: CacheReport, limits: Limits) -> CacheReport:
    """*report* with no more namespaces, and no more of what they stand for, than fits."""
    shown = report.namespaces
    if len(shown) > limits.shown_namespaces:
        shown = heapq.nlargest(limits.shown_namespaces, shown, key=lambda n: n.blocks)
    left_bytes = limits.shown_parts_bytes
    report.namespaces = []
    for namespace in shown:
        left_bytes -= sum(len(k) + len(v) for k, v in namespace.parts.items())
        report.namespaces.append(namespace if left_bytes >= 0 else _without_parts(namespace))
    return report


def _without_parts(namespace: NamespaceReport) -> NamespaceReport:
    return NamespaceReport(
        namespace.namespace, {}, namespace.blocks, namespace.host_blocks, namespace.disk_blocks
    )
