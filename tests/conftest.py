"""Shared by all tests: a clean environment, Hypothesis profiles, a tiny model."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

# What helpers compare is shown, too.
pytest.register_assert_rewrite("tests.caches", "tests.machines", "tests.remote", "tests.vllm")

# HYPOTHESIS_PROFILE chooses one. No deadlines: how long a test takes depends on its neighbours.
settings.register_profile("default", max_examples=100, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, print_blob=True)
# Whether there is a failure, without looking for its shortest form.
_FINDING = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("find", max_examples=100, deadline=None, phases=_FINDING)
settings.register_profile("nightly", max_examples=20_000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure() -> None:
    """Before anything imports an engine: it reads these when it is imported."""
    for name in [name for name in os.environ if name.startswith("KVSTRATA_")]:
        del os.environ[name]
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    # vLLM's own choice differs with and without a connector, and with it the order of sums.
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Nor on one core each: there are more workers than cores, and who waits leaves its own idle.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # The process that forks engines loads torch before vLLM binds it: two threads of each engine
        # that wait for each other on cores they share make everything five times as slow.
        os.environ["OMP_NUM_THREADS"] = "1"
    else:
        cores = sorted(os.sched_getaffinity(0))[:4]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))


@pytest.hookimpl(trylast=True)  # after the shuffle
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with engines, which compute, among those with servers and clients, which mostly wait.

    The last ones are without engines: one that takes minutes would have the cores to itself.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    computes = {path: any(map(_has_engine, own)) for path, own in files.items()}
    places: dict[Path, float] = {}
    for kind, end in ((True, 0.8), (False, 1.0)):
        paths = [path for path in files if computes[path] is kind]
        places |= {path: end * i / len(paths) for i, path in enumerate(paths)}
    items.sort(key=lambda item: places[item.path])


def _has_engine(item: pytest.Item) -> bool:
    return item.get_closest_marker("vllm") is not None


@pytest.fixture(autouse=True, scope="session")
def _workers_that_are_gone_write_nothing() -> Iterator[None]:
    """In this process: their slots need not be kept for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstrata.manager.manager.WRITER_GRACE_SECONDS", 0.0)
        yield


@pytest.fixture(autouse=True)
def _our_logger_is_as_at_the_start() -> None:
    """A connector in this process would make it log as vLLM does, into pytest's handlers twice."""
    ours = logging.getLogger("kvstrata")
    ours.handlers = [logging.NullHandler()]
    ours.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama in float32: start vLLM with ``dtype="float32"`` on it.

    Greedy tokens then do not depend on batching or chunked prefill, so that two runs that differ
    in one token differ in the keys and values that were used.
    """
    from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    return write_tiny_llama(folder, TinyLlama(dtype="float32"))


@pytest.fixture(scope="session")
def tiny_llama_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one in bfloat16, of sizes for which vLLM has but one way to compute on any x86.

    With AMX it rounds otherwise by how many tokens are in a forward: it has attention with AMX for
    heads of a multiple of 32, matrices for sizes of a multiple of 16, and oneDNN's for all others,
    which ``ROUNDED_ALIKE`` keeps from AMX.
    """
    from kvstrata.integration.vllm.tiny_model import TinyLlama, write_tiny_llama

    folder = tmp_path_factory.mktemp("models") / "tiny-llama-bfloat16"
    return write_tiny_llama(folder, TinyLlama(dtype="bfloat16", hidden_size=248, head_dim=48))
