"""The device blocks of an engine that computes on the CPU."""

from collections.abc import Sequence
from typing import Any

from kvstrata.transfer.cpu import CpuPageCopier
from kvstrata.transfer.devices import PagewiseDevice

__all__ = ["open_device"]


def open_device(pages: Sequence[Sequence[Any]]) -> PagewiseDevice:
    """*pages* as in ``kvstrata.transfer.devices.open_device``."""
    return PagewiseDevice([CpuPageCopier([page.numpy() for page in group]) for group in pages])
