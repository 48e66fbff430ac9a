"""A pytest plugin: every scheduler that vLLM's own tests make has KVStrata as its connector.

Schedulers with a connector that the test itself defines keep it. There is no model and so no
worker: what the plan of a step tells the workers to do is reported as done at the step's end. In
the report a test has the property ``IN_A_STEP`` if KVStrata has planned one.
"""

import copy
from collections.abc import Iterator
from typing import Any, Final

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvstrata.integration.vllm import link
from kvstrata.integration.vllm.metadata import StepPlan, WorkerReport

# vLLM's own, which its tests name for want of a better one.
_REPLACED: Final = {"ExampleConnector", "NixlConnector"}
IN_A_STEP: Final = ("kvstrata", "in a step")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kvstrata-role", help="of the connector; without it nothing is changed")


@pytest.fixture(autouse=True)
def kvstrata_everywhere(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Point every scheduler at KVStrata, if a role is given."""
    role = request.config.getoption("--kvstrata-role")
    if role is None:
        yield
        return
    connectors: list[Any] = []
    properties: list[tuple[str, object]] = request.node.user_properties
    init, schedule = Scheduler.__init__, Scheduler.schedule
    update = Scheduler.update_from_output

    def init_with_kvstrata(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        is_ours = _point_at_kvstrata(config, role)
        init(self, *args, **kwargs)
        if is_ours:
            connectors.append(self.connector)

    def schedule_and_note(self: Scheduler, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = schedule(self, *args, **kwargs)
        if isinstance(output.kv_connector_metadata, StepPlan) and IN_A_STEP not in properties:
            properties.append(IN_A_STEP)
        return output

    def update_with_report(
        self: Scheduler, output: SchedulerOutput, done: ModelRunnerOutput
    ) -> object:
        plan = output.kv_connector_metadata
        return update(self, output, _reported(done, plan) if isinstance(plan, StepPlan) else done)

    monkeypatch.setattr(Scheduler, "__init__", init_with_kvstrata)
    monkeypatch.setattr(Scheduler, "schedule", schedule_and_note)
    monkeypatch.setattr(Scheduler, "update_from_output", update_with_report)
    monkeypatch.setattr(link, "_WORKERS_SECONDS", 0.0)  # there are none to wait for
    yield
    for connector in connectors:
        connector.shutdown()


def _point_at_kvstrata(config: VllmConfig, role: str) -> bool:
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector not in _REPLACED:
        return False
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVStrataConnector",
        kv_connector_module_path="kvstrata.integration.vllm.connector",
        kv_role=role,
        kv_load_failure_policy=transfer.kv_load_failure_policy if transfer else "recompute",
        kv_connector_extra_config={
            "tiers": "host:8MiB",
            # vLLM's tests expect a request in the first step.
            "lookup_wait_seconds": 1,
            "lookup_timeout_seconds": 1,
            "tokens_per_block": config.cache_config.block_size,
        },
    )
    return True


def _reported(done: ModelRunnerOutput, plan: StepPlan) -> ModelRunnerOutput:
    """*done*, and that the workers have carried out *plan*."""
    if not plan.saves and not plan.loads:
        return done
    done = copy.copy(done)
    theirs = done.kv_connector_output or KVConnectorOutput()
    done.kv_connector_output = copy.copy(theirs)
    done.kv_connector_output.finished_recving = set(theirs.finished_recving or ()) | {
        load.request_id for load in plan.loads if not load.at_once
    }
    done.kv_connector_output.kv_connector_worker_meta = WorkerReport(
        saved={save.task_id: 1 for save in plan.saves},
        load_done={load.task_id: 1 for load in plan.loads},
    )
    return done
