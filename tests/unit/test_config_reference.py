import re
from pathlib import Path

import yaml

from kvstrata.core.config import Config
from kvstrata.core.load import load_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_the_reference_page_has_a_row_for_every_setting() -> None:
    for name in Config.model_fields:
        assert f"| `{name}` |" in PAGE


def test_the_examples_of_the_reference_page_load(tmp_path: Path) -> None:
    mappings = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(mappings) == 2
    for block in mappings:
        path = tmp_path / "example.yaml"
        path.write_text(block)
        loaded = load_config({"config_file": path}, environ={})
        assert loaded != Config()
        assert yaml.safe_load(block).keys() == loaded.model_fields_set
