"""Hot path of the engine: the hooks that vLLM's scheduler calls in a step, whatever is to be done."""

import tempfile
from collections.abc import Generator
from functools import partial
from pathlib import Path

from bench.operations.count import Count
from bench.step_hooks import HOOKS, Side

__all__ = ["idle_step"]


def idle_step(count: Count, requests: int) -> Generator[None]:
    """The hooks of steps that complete no block and in which no save runs."""
    from kvstrata.integration.vllm.tiny_model import write_tiny_llama

    with tempfile.TemporaryDirectory() as folder:
        side = Side(write_tiny_llama(Path(folder)), requests, connector=True)
        try:
            for name in HOOKS:
                hook = getattr(side.scheduler.connector, name)
                setattr(side.scheduler.connector, name, partial(count, hook))
            while True:
                before = count.sample.copy()
                _, _, had_work = side.step()
                if had_work:
                    count.sample = before
                else:
                    yield
        finally:
            side.close()
