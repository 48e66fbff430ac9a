import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch

from kvstrata.transfer.cpu_device import open_device


def copy_cpus() -> frozenset[int] | None:
    return open_device([[torch.zeros((2, 64), dtype=torch.uint8)]]).copy_cpus


def copy_cpus_of_a_bound_worker() -> frozenset[int] | None:
    """As OpenMP binds the first thread of a worker of vLLM."""
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    return copy_cpus()


def test_copies_run_where_the_process_that_has_started_the_worker_may() -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as workers:
        found = workers.submit(copy_cpus_of_a_bound_worker).result(60)
    assert found == frozenset(os.sched_getaffinity(0))


def test_a_process_that_nobody_has_started_keeps_its_copies_to_itself() -> None:
    assert copy_cpus() is None
