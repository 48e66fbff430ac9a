"""`kvstrata check` says what it found, and its exit code is the verdict."""

import json
from pathlib import Path

import pytest
from tests.cli.processes import kvstrata
from typer.testing import CliRunner

from kvstrata.cli.main import app
from kvstrata.storage.disk import DiskStore

BLOCK_BYTES = 4096
KEYS = [b"n" * 16 + bytes([number]) * 32 for number in range(3)]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A closed store of 4 slots with three blocks."""
    path = tmp_path / "store"
    store = DiskStore([path], block_bytes=BLOCK_BYTES, capacity_bytes=4 * 8192)
    store.write(KEYS, [None] * 3, [memoryview(bytes([n]) * BLOCK_BYTES) for n in range(3)])
    store.close()
    return path


def damage(path: Path) -> None:
    with (path / "kvstrata_0.bin").open("r+b") as file:
        file.seek(8192)
        file.write(b"wrong")


def test_a_sound_tier_ends_with_0(made: Path) -> None:
    result = kvstrata("check", str(made))
    assert (result.returncode, result.stderr) == (0, "")
    assert "good blocks" in result.stdout
    assert result.stdout.endswith("sound\n")


def test_damage_ends_with_1_names_the_namespace_and_changes_nothing(made: Path) -> None:
    damage(made)
    for _ in range(2):
        result = kvstrata("check", str(made))
        assert result.returncode == 1
        assert "damage found; --repair forgets" in result.stdout
        assert (b"n" * 16).hex() in result.stdout


def test_a_repair_says_so_and_is_sound_the_next_time(made: Path) -> None:
    damage(made)
    (made / "notes.txt").write_text("mine")
    repaired = CliRunner().invoke(app, ["check", str(made), "--repair"])
    assert repaired.exit_code == 1
    assert "damage found and repaired" in repaired.stdout
    assert f"not of this store: {made}/notes.txt" in repaired.stdout
    assert CliRunner().invoke(app, ["check", str(made)]).exit_code == 0
    assert (made / "notes.txt").read_text() == "mine"


def test_json_has_every_figure(made: Path) -> None:
    damage(made)
    result = CliRunner().invoke(app, ["check", str(made), "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert len(bytes.fromhex(found.pop("store"))) == 16
    assert found == {
        "sound": False,
        "repaired": False,
        "format_version": 2,
        "block_bytes": 4096,
        "slot_bytes": 8192,
        "slots": 4,
        "free_slots": 1,
        "max_blocks_per_file": 32000,
        "directories": 1,
        "stripe_blocks": 4,
        "good_blocks": 2,
        "damaged_blocks": 1,
        "lost_blocks": 0,
        "has_journal": True,
        "damaged_records": 0,
        "torn_bytes": 0,
        "namespaces": {(b"n" * 16).hex(): {"good_blocks": 2, "damaged_blocks": 1}},
        "short_files": [],
        "stray_files": [],
    }


def test_a_missing_journal_is_named(made: Path) -> None:
    (made / "kvstrata.journal").unlink()
    result = CliRunner().invoke(app, ["check", str(made)])
    assert result.exit_code == 1
    assert "the journal is missing" in result.stdout


def test_what_is_no_tier_ends_with_2_and_a_remedy(tmp_path: Path) -> None:
    for name in ("empty", "waiting", "mine", "shared"):
        (tmp_path / name).mkdir()
    (tmp_path / "waiting" / "kvstrata.lock").write_text("1\n")
    (tmp_path / "mine" / "thesis.tex").write_text("")
    (tmp_path / "shared" / "kvstrata.shared").write_text("")
    for name, complaint, remedy in (
        ("none", "there is no {}", "name the directories of the disk tier"),
        ("mine/thesis.tex", "{} is not a directory", "name the directories"),
        ("empty", "{} is empty: no engine has used this disk tier yet", "start an engine with it"),
        ("waiting", "{} is empty", "mount the disk"),
        ("mine", "{}: it has no kvstrata.superblock, but 'thesis.tex'", "name the directories"),
        ("shared", "{} is a shared tier", "name the directories"),
    ):
        result = CliRunner().invoke(app, ["check", str(tmp_path / name)])
        assert result.exit_code == 2
        message, _, hint = result.stderr.partition("\n  hint: ")
        assert complaint.partition("{}")[2] in message
        assert str(tmp_path / name) in message
        assert remedy in hint


def test_a_tier_in_use_ends_with_2(made: Path) -> None:
    store = DiskStore([made], block_bytes=BLOCK_BYTES, capacity_bytes=4 * 8192)
    result = kvstrata("check", str(made))
    store.close()
    assert result.returncode == 2
    assert "in use by process" in result.stderr
