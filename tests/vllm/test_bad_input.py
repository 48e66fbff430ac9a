"""What an operator gets wrong stops the engine at its start, and the log says what to do."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.strangers import NOBODY, needs_root, socket_of_a_stranger
from tests.vllm.engine import Engine, EngineFailed

from kvstrata.core.load import load_config
from kvstrata.manager.manager import KVManager

pytestmark = pytest.mark.vllm


def _engine(model: Path, folder: Path, name: str, extra: dict[str, Any]) -> Engine:
    transfer = {
        "kv_role": "kv_both",
        "engine_id": f"{name}-{random.randrange(1 << 30)}",
        "kv_connector_extra_config": extra,
    }
    return Engine(model, folder / f"{name}.log", transfer, is_split=name == "misspelt")


def _directory_of_another_version(folder: Path) -> Path:
    disk = folder / "later"
    config = load_config({"tiers": f"host:1MiB | disk:{disk}:16MiB", "prefault": False})
    KVManager(config, block_bytes=4096).close()
    with (disk / "kvstrata.superblock").open("r+b") as superblock:
        superblock.seek(8)  # docs/on-disk-format.md
        superblock.write(b"\7")
    return disk


def _contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture
def theirs() -> Iterator[Path]:
    with socket_of_a_stranger() as path:
        yield path


@needs_root
def test_bad_settings_stop_the_engine_with_a_message(
    tiny_llama: Path, tmp_path: Path, theirs: Path
) -> None:
    later = _directory_of_another_version(tmp_path)
    before = _contents(later)
    cases: dict[str, tuple[dict[str, Any], list[str]]] = {
        "misspelt": ({"tires": "host:64MiB"}, ["tires", "did you mean", "tiers"]),
        "later": (
            {"tiers": f"host:64MiB | disk:{later}:16MiB"},
            [str(later), "has format version 7, this release reads version 2", "hint:"],
        ),
        "unitless": (
            {"tiers": "host:256"},
            [
                "ConfigError: the host tier of 256 B holds no block: one takes ",
                "in `tiers`, for example host:8GiB; a number without a unit counts bytes\n",
            ],
        ),
        "huge": ({"tiers": "host:100TiB"}, ["the host tier wants 100.0 TiB", "hint:"]),
        "theirs": (
            {"server": "attached", "socket": str(theirs)},
            [f"the socket {theirs} belongs to uid {NOBODY}", "hint:"],
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
    assert _contents(later) == before
