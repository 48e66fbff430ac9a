"""The connector with the settings of UCM or FlexKV, and nothing changed but where it is found."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engine import embedded_report
from tests.vllm.plans import full, group, plan, vllm_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvstrata.integration.vllm.blend.connector import BlendConnector
from kvstrata.integration.vllm.connector import KVStrataConnector


def _of_ucm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    file = folder / "ucm_config.yaml"
    file.write_text(
        "ucm_connectors:\n"
        "  - ucm_connector_name: UcmPipelineStore\n"
        "    ucm_connector_config:\n"
        "      store_pipeline: Cache|Posix\n"
        f"      storage_backends: {folder}/kv\n"
        "      cache_buffer_capacity_gb: 0.0625\n"
        "      posix_capacity_gb: 0.25\n"
        "      io_direct: true\n"
    )
    return {"UCM_CONFIG_FILE": str(file)}


def _of_flexkv(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    file = folder / "flexkv_config.json"
    settings = {"cpu_cache_gb": 0.0625, "ssd_cache_gb": 0.25, "ssd_cache_dir": f"{folder}/kv"}
    file.write_text(json.dumps(settings))
    monkeypatch.setenv("FLEXKV_CONFIG_PATH", str(file))
    monkeypatch.setenv("FLEXKV_IOURING_ENTRIES", "512")
    return {}


def test_the_name_that_the_page_changes_leads_vllm_from_ucm_to_us() -> None:
    page = (Path(__file__).parents[2] / "docs/migrating.md").read_text()
    lines = page.split("```diff\n")[1].split("```")[0].splitlines()
    before = json.loads("\n".join(line[1:] for line in lines if line[0] != "+"))
    after = json.loads("\n".join(line[1:] for line in lines if line[0] != "-"))
    changed = {name for name, value in after.items() if before[name] != value}
    assert changed == {"kv_connector_module_path"}
    assert KVConnectorFactory.get_connector_class(KVTransferConfig(**after)) is KVStrataConnector
    with pytest.raises(ModuleNotFoundError, match="ucm"):
        KVConnectorFactory.get_connector_class(KVTransferConfig(**before))


@pytest.mark.parametrize("name", ["BlendConnector", "UCMBlendConnector"])
def test_the_blending_connector_is_found_where_ucm_has_it(name: str) -> None:
    path = "kvstrata.integration.vllm.blend_connector"
    found = KVTransferConfig(kv_connector=name, kv_connector_module_path=path, kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(found) is BlendConnector


@pytest.mark.parametrize(
    ("words", "idle"), [(_of_ucm, "io_direct"), (_of_flexkv, "IOURING_ENTRIES")]
)
def test_the_server_of_an_engine_has_the_tiers_that_they_say(
    words: Any,
    idle: str,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="kvstrata.core.load")
    name = f"words-{random.randrange(1 << 30)}"
    config = vllm_config(tiny_llama)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVStrataConnector",
        kv_role="kv_both",
        engine_id=name,
        kv_connector_extra_config=words(tmp_path, monkeypatch),
    )
    connector = KVStrataConnector(config, KVConnectorRole.SCHEDULER, plan(config, group(full())))
    try:
        host, disk = embedded_report(name).tiers
    finally:
        connector.shutdown()
    assert (host.tier, host.capacity_blocks * host.block_bytes) == ("host", 64 << 20)
    assert disk.tier == "disk"
    assert 200 << 20 < disk.capacity_blocks * disk.block_bytes < 256 << 20  # and proofs of blocks
    assert any((tmp_path / "kv").iterdir())
    note, warning = [r.getMessage() for r in caplog.records if r.name == "kvstrata.core.load"]
    assert f"is read as tiers: host:64MiB | disk:{tmp_path}/kv:256MiB" in note
    assert f"{idle}" in warning
    assert warning.endswith("without effect, KVStrata has no such part")
