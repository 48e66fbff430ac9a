"""How a GPU copies, asked without knowing of which kind it is."""

import json
from types import SimpleNamespace

import pytest
import torch

from kvstrata.transfer import measure


def test_where_torch_has_no_gpu_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main([]) == 0
    assert json.loads(capsys.readouterr().out) == {"problem": "torch finds no GPU"}


def test_a_kind_without_copies_of_its_own_is_copied_by_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    kind = SimpleNamespace(type="xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind)
    assert measure.main(["4096"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpu"] == "xpu"
    assert "by torch" in found["report"]
