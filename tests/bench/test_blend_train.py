"""What trains the model of bench/blend, in as many steps as show that it runs."""

import json
from pathlib import Path

import pytest
import torch
from bench.blend import train
from bench.blend.checkpoint import load_model
from bench.blend.muon import even

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("shape", [(2, 16, 40), (2, 40, 16)])
def test_singular_values_are_made_about_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    values = left.mT @ even(matrices) @ right.mT
    diagonal = values.diagonal(dim1=1, dim2=2)
    assert diagonal.min() > 0.6
    assert diagonal.max() < 1.25
    torch.testing.assert_close(values, torch.diag_embed(diagonal), atol=1e-4, rtol=0)


def test_the_same_seed_trains_the_same_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("one", "again")]
    for folder in folders:
        train.main(["--out", str(folder), "--seed", "3", "--steps", "3"])
    assert "387936 parameters" in capsys.readouterr().out
    one, again = (load_model(folder).state_dict() for folder in folders)
    assert all(torch.equal(one[name], again[name]) for name in one)
    made = json.loads((folders[0] / "training.json").read_text(encoding="utf-8"))
    assert made["command"] == "python -m bench.blend.train --seed 3 --steps 3"
    assert made["torch"] == torch.__version__


def test_rates_go_up_stay_and_go_down() -> None:
    rates = [train.rate(step, 1000) for step in range(1, 1001)]
    assert rates[0] < rates[30] < rates[60] == 1.0
    assert rates[390] == 1.0 > rates[500] > rates[900]
    assert rates[-1] == pytest.approx(train.FINAL_SHARE)
