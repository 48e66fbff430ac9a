"""The device blocks of an engine that computes on the CPU."""

import multiprocessing
import os
from collections.abc import Sequence
from typing import Any

from kvstrata.storage.numa import cpus_near
from kvstrata.transfer.cpu import CpuPageCopier
from kvstrata.transfer.devices import PagewiseDevice

__all__ = ["open_device"]


def open_device(pages: Sequence[Sequence[Any]]) -> PagewiseDevice:
    """*pages* as in ``kvstrata.transfer.devices.open_device``."""
    copiers = [CpuPageCopier([page.numpy() for page in group]) for group in pages]
    return PagewiseDevice(copiers, copy_cpus=_cpus_to_copy_on())


def _cpus_to_copy_on() -> frozenset[int] | None:
    """Those near this thread's that the process may use which has started this one, if one has.

    vLLM starts a worker with ``OMP_PLACES`` (``OMPProcessManager``), by which OpenMP binds its first
    thread to the processors that the model computes on. A thread begins bound as its starter is: it
    would copy there, and the model would wait for it while other processors are idle.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return None
    try:
        theirs = frozenset(os.sched_getaffinity(parent.pid))
    except OSError:
        return None
    ours = frozenset(os.sched_getaffinity(0))
    return ours | (cpus_near(ours) or theirs) & theirs
