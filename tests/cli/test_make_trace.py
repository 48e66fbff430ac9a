from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstrata.cli.main import app
from kvstrata.replay.formats import Reading, open_trace


def make_trace(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["make-trace", *map(str, arguments)])
    return result.exit_code, result.stderr


def test_a_trace_is_made_that_can_be_read(tmp_path: Path) -> None:
    for name in ("plain.jsonl", "packed.jsonl.gz", "again.jsonl.gz"):
        assert make_trace(tmp_path / name, "--requests", "300", "--seed", "9") == (0, "")
    plain, packed = (
        [request.blocks.tolist() for request in open_trace(tmp_path / name, Reading()).read()]
        for name in ("plain.jsonl", "packed.jsonl.gz")
    )
    assert plain == packed
    assert len(plain) == 300
    assert (tmp_path / "packed.jsonl.gz").read_bytes()[:2] == b"\x1f\x8b"
    files = [(tmp_path / name).read_bytes() for name in ("packed.jsonl.gz", "again.jsonl.gz")]
    assert files[0] == files[1]


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("mine")
    code, said = make_trace(path)
    assert code == 2
    assert "cannot be made: File exists" in said
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "mix", ["chat", "chat=x", "chat=0", "chat=-1", "talk=1", "chat=1,chat=2", "", "chat=1,"]
)
def test_a_mix_that_is_none_is_refused_and_leaves_no_file(tmp_path: Path, mix: str) -> None:
    code, said = make_trace(tmp_path / "trace.jsonl", "--mix", mix)
    assert code == 2
    assert "is not KIND=SHARE" in said
    assert "chat, document, agent, single" in said
    assert list(tmp_path.iterdir()) == []


def test_kinds_that_are_not_in_the_mix_do_not_occur(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert make_trace(path, "--mix", "single=1", "--requests", "200")[0] == 0
    first = [
        request.blocks[0] for request in open_trace(path, Reading()).read() if len(request.blocks)
    ]
    assert len(set(first)) == len(first)
