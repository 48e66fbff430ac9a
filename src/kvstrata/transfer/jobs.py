"""Jobs of a thread pool whose outcome nobody asks for."""

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future

__all__ = ["give"]

_log = logging.getLogger(__name__)


def give(pool: Executor, job: Callable[[], None]) -> None:
    """Have *pool* do *job*; what it raises is logged. ``RuntimeError`` if the pool is closed."""
    pool.submit(job).add_done_callback(_report)


def _report(job: Future[None]) -> None:
    error = None if job.cancelled() else job.exception()
    if error is not None:
        _log.error("a job has ended by a bug", exc_info=error)
