"""What an operator gets wrong stops the engine at its start, and the log says what to do."""

import random
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engine import BLOCK_SIZE, Engine, EngineFailed

from kvstrata.core.load import load_config
from kvstrata.manager.manager import KVManager

pytestmark = pytest.mark.vllm


def _engine(model: Path, folder: Path, name: str, extra: dict[str, Any]) -> Engine:
    transfer = {
        "kv_role": "kv_both",
        "engine_id": f"{name}-{random.randrange(1 << 30)}",
        "kv_connector_extra_config": extra,
    }
    return Engine(model, folder / f"{name}.log", transfer)


def _directory_of_another_geometry(folder: Path) -> Path:
    """A disk tier whose blocks have 4096 bytes, fewer than any engine's here."""
    disk = folder / "kv"
    config = load_config({"tiers": f"host:1MiB | disk:{disk}:16MiB", "prefault": False})
    KVManager(config, block_bytes=4096).close()
    return disk


def test_bad_settings_stop_the_engine_with_a_message(tiny_llama: Path, tmp_path: Path) -> None:
    foreign = _directory_of_another_geometry(tmp_path)
    cases: dict[str, tuple[dict[str, Any], list[str]]] = {
        "misspelt": ({"tires": "host:64MiB"}, ["tires", "did you mean", "tiers"]),
        "multiple": (
            {"tiers": "host:64MiB", "tokens_per_block": BLOCK_SIZE + 1},
            [f"tokens_per_block = {BLOCK_SIZE + 1}", f"multiple of {BLOCK_SIZE}"],
        ),
        "foreign": (
            {"tiers": f"host:64MiB | disk:{foreign}:16MiB"},
            [str(foreign), "hint:"],
        ),
    }
    engines = {
        name: _engine(tiny_llama, tmp_path, name, extra) for name, (extra, _) in cases.items()
    }
    try:
        for name, (_, texts) in cases.items():
            with pytest.raises(EngineFailed):
                engines[name].wait_ready()
            log = engines[name].log_text()
            assert [text for text in texts if text not in log] == [], name
    finally:
        for engine in engines.values():
            engine.kill()
