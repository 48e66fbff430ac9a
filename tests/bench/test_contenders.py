"""How engines are set up that are measured beside each other."""

from pathlib import Path

import pytest

from kvstrata.bench.contenders import CONTENDERS, transfer_config
from kvstrata.bench.models import Model
from kvstrata.bench.session import deployment
from kvstrata.core.load import load_config

MODEL = Model("", "float32", 1024, 6144, 8448, 32, "a model")


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name.startswith("kvstrata")])
def test_an_answer_that_a_busy_machine_delays_is_a_slow_hit(name: str, tmp_path: Path) -> None:
    transfer = transfer_config(deployment(name, MODEL, tmp_path, 2050, 1), "cpu")
    assert transfer
    config = load_config(transfer["kv_connector_extra_config"])
    assert config.lookup_timeout_seconds >= 1.0
