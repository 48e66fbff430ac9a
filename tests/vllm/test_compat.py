"""The surface of vLLM: that the list of it is whole, and that what it lacks is said in words."""

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import vllm
from tests.vllm.surface import Surface
from vllm.config import ModelConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from kvstrata.cli.diagnosis import VLLM_SUPPORTED
from kvstrata.core.errors import ConfigError
from kvstrata.integration.vllm import compat
from kvstrata.integration.vllm.compat import (
    BLENDING,
    HOOKING,
    NEWER,
    RECURRENT,
    SUPPORTED,
    SURFACE,
    check_vllm,
    has_attribute,
)

PACKAGE = Path(compat.__file__).parent
# What only these files use is in a list of its own.
BESIDES = [
    ("BLENDING", BLENDING, {*(PACKAGE / "blend").rglob("*.py")}),
    ("HOOKING", HOOKING, {PACKAGE / "hooks.py", PACKAGE / "direct.py"}),
    ("RECURRENT", RECURRENT, {PACKAGE / "recurrent.py"}),
]
# What vLLM alone calls, and must.
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"
CALLED = {_BASE, f"{_BASE}.get_loaded_kv_cache_group_ids"}


def dotted(surface: compat.Surface) -> set[str]:
    """``module.name`` and ``module.name.attribute`` of all that is listed."""
    listed = set()
    for module, names in surface.items():
        for name, attributes in names.items():
            listed.add(f"{module}.{name}")
            listed |= {f"{module}.{name}.{attribute}" for attribute in attributes.split()}
    return listed


def used_by(surface: Surface, paths: Collection[Path]) -> set[str]:
    used = set()
    for module, names in surface.used(paths).items():
        for name in names:
            owner, _, attribute = name.partition(".")
            used |= {f"{module}.{owner}", f"{module}.{owner}.{attribute}".rstrip(".")}
    return used


def test_list_has_all_that_the_package_uses_of_vllm_and_nothing_else() -> None:
    package = Surface(PACKAGE)
    elsewhere = package.paths.difference(*(paths for _, _, paths in BESIDES))
    listed, used = dotted(SURFACE) | dotted(NEWER), used_by(package, elsewhere)
    assert used - listed == set(), "add these to SURFACE in compat.py"
    assert listed - used == set(), "nothing uses these: drop them from SURFACE in compat.py"
    for name, besides, paths in BESIDES:
        there, used_there = dotted(besides), used_by(package, paths)
        assert used_there - listed - there == set(), f"add these to {name} in compat.py"
        assert there - used_there - CALLED == set(), f"nothing uses these: drop them from {name}"
        twice = {
            each for each in there & listed if not any(o.startswith(f"{each}.") for o in there)
        }
        assert twice == set(), f"SURFACE has these: drop them from {name}"


def test_this_vllm_lacks_nothing() -> None:
    check_vllm()


@pytest.mark.parametrize("besides", [b for _, b, _ in BESIDES], ids=[name for name, *_ in BESIDES])
def test_this_vllm_lacks_nothing_that_a_part_needs_besides(besides: compat.Surface) -> None:
    check_vllm(besides)


def test_what_is_missing_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BlockPool, "touch")
    monkeypatch.setattr(Request, "__init__", lambda self: None)
    with pytest.raises(ConfigError) as caught:
        check_vllm()
    message = str(caught.value)
    assert (
        f"vLLM {vllm.__version__} lacks BlockPool.touch, Request.all_token_ids, Request.block"
        in message
    )
    assert f"install vLLM {SUPPORTED}" in message


@pytest.mark.parametrize(
    ("version", "newer", "message"),
    [
        (
            "0.30.0",
            {"vllm.v1.request": {"Request": "num_tokens soothsay"}},
            "going on without Request.soothsay, which vLLM 0.30.0 lacks",
        ),
        (
            "0.33.1",
            {},
            "KVStrata was tested with vLLM >=0.30,<0.33 only; install one of these",
        ),
    ],
)
def test_other_versions_are_warned_of_once(
    version: str,
    newer: compat.Surface,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(compat, "NEWER", newer)
    compat._warn_of_version.cache_clear()
    try:
        check_vllm()
        check_vllm()
    finally:
        compat._warn_of_version.cache_clear()
    (record,) = caplog.records
    assert message in record.getMessage()
    assert SUPPORTED in record.getMessage()


def test_missing_modules_and_names_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"vllm.gone": {"Anything": "at_all"}, "vllm.v1.request": {"Gone": "too"}}
    monkeypatch.setattr(compat, "SURFACE", gone)
    with pytest.raises(ConfigError, match=r"lacks vllm\.gone, vllm\.v1\.request\.Gone"):
        check_vllm()


def run(program: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300
    )


def test_a_vllm_without_a_name_is_refused_before_the_name_is_imported() -> None:
    done = run(
        "from vllm.distributed.kv_transfer.kv_connector.v1 import base\n"
        "del base.KVConnectorTransferResults\n"
        "import kvstrata.integration.vllm.connector\n"
    )
    assert "kvstrata.core.errors.ConfigError: vLLM" in done.stderr
    assert "lacks vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults" in (
        done.stderr
    )
    assert "ImportError" not in done.stderr


def test_a_vllm_that_lacks_what_blending_needs_runs_without_blending() -> None:
    done = run(
        "import vllm.lora.model_manager as lora\n"
        "del lora.LoRAModelManager.set_adapter_mapping\n"
        "import kvstrata.integration.vllm.connector\n"
        "import kvstrata.integration.vllm.direct\n"
        "print('these go on')\n"
        "import kvstrata.integration.vllm.blend.connector\n"
    )
    assert done.stdout.splitlines()[-1:] == ["these go on"]
    assert "lacks LoRAModelManager.set_adapter_mapping" in done.stderr
    assert "or set kv_connector to KVStrataConnector" in done.stderr


def test_attributes_are_found_wherever_a_class_keeps_them() -> None:
    assert has_attribute(Request, "num_tokens")  # a property
    assert has_attribute(Request, "block_hashes")  # set by __init__
    assert has_attribute(ModelConfig, "quantization_config")
    assert not has_attribute(Request, "request_ids")


def test_use_is_seen_through_annotations_loops_and_calls(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(
        "from vllm.config import VllmConfig\n"
        "from vllm.v1.kv_cache_interface import KVCacheConfig\n"
        "class Half:\n"
        "    def __init__(self, config: VllmConfig, plan: 'KVCacheConfig | None') -> None:\n"
        "        self._cache = config.cache_config\n"
        "        self._plan = plan\n"
        "    def sizes(self):\n"
        "        names = [n for g in self._plan.kv_cache_groups for n in g.layer_names]\n"
        "        return self._cache.block_size, names, getattr(self._plan, 'num_blocks', 0)\n"
    )
    assert Surface(tmp_path).used() == {
        "vllm.config": {"VllmConfig"},
        "vllm.config.vllm": {"VllmConfig.cache_config"},
        "vllm.config.cache": {"CacheConfig.block_size"},
        "vllm.v1.kv_cache_interface": {
            "KVCacheConfig",
            "KVCacheConfig.kv_cache_groups",
            "KVCacheConfig.num_blocks",
            "KVCacheGroupSpec.layer_names",
        },
    }


def test_use_is_seen_through_base_classes_tuples_and_literal_names(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(
        "from typing import NamedTuple\n"
        "from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1\n"
        "from vllm.v1.request import Request\n"
        "class Standing(NamedTuple):\n"
        "    request: Request\n"
        "    first: int\n"
        "class One(KVConnectorBase_V1):\n"
        "    pass\n"
        "class Other(One):\n"
        "    def look(self, standing: list[Standing], numbers: list[int]):\n"
        "        model, parallel = None, self._vllm_config.parallel_config\n"
        "        for name in ('world_size', 'tensor_parallel_size'):\n"
        "            getattr(parallel, name)\n"
        "        for (request, first), number in zip(standing, numbers):\n"
        "            model, lora = request.status, request.lora_request\n"
        "            lora.adapter_id\n"
    )
    assert Surface(tmp_path).used() == {
        "vllm.config.parallel": {
            "ParallelConfig.tensor_parallel_size",
            "ParallelConfig.world_size",
        },
        "vllm.config.vllm": {"VllmConfig.parallel_config"},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1",
            "KVConnectorBase_V1._vllm_config",
        },
        "vllm.lora.request": {"LoRARequest.adapter_id"},
        "vllm.v1.request": {"Request", "Request.lora_request", "Request.status"},
    }


def test_doctor_supports_the_same_versions() -> None:
    assert VLLM_SUPPORTED == SUPPORTED
