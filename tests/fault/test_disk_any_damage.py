"""Whatever happens to the files: blocks are right, or missing, or the directory is refused."""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.fault.lives import SLOT_BYTES, Life, make, read

from kvstrata.core.errors import FormatError
from kvstrata.storage.disk_check import check_store
from kvstrata.testing import FaultyFiles

DAMAGES_OF_A_KIND = 30


def flip(file: Path, choose: Random) -> None:
    """One bit, anywhere."""
    data = bytearray(file.read_bytes())
    data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    file.write_bytes(data)


def garble(file: Path, choose: Random) -> None:
    """A sector of noise, anywhere."""
    data = bytearray(file.read_bytes())
    start = choose.randrange(0, len(data), 512)
    data[start : start + 512] = choose.randbytes(len(data[start : start + 512]))
    file.write_bytes(data)


def truncate(file: Path, choose: Random) -> None:
    os.truncate(file, choose.randrange(file.stat().st_size))


def tear(file: Path, choose: Random) -> None:
    """A slot whose beginning is that of another slot, cut at any sector."""
    data = bytearray(file.read_bytes())
    slots = len(data) // SLOT_BYTES
    one, other = (n * SLOT_BYTES for n in choose.sample(range(slots), 2))
    cut = choose.randrange(512, SLOT_BYTES, 512)
    data[one : one + cut] = data[other : other + cut]
    file.write_bytes(data)


def remove(file: Path, _: Random) -> None:
    file.unlink()


SLOT_FILES = ["one/kvstrata_0.bin", "one/kvstrata_1.bin", "two/kvstrata_0.bin"]
HEADS = ["one/kvstrata.superblock", "two/kvstrata.superblock"]
JOURNAL = ["one/kvstrata.journal"]
DAMAGES: list[tuple[Callable[[Path, Random], None], list[str]]] = [
    (flip, SLOT_FILES),
    (flip, JOURNAL),
    (flip, HEADS),
    (garble, SLOT_FILES),
    (garble, JOURNAL),
    (tear, ["one/kvstrata_0.bin", "two/kvstrata_0.bin"]),
    (truncate, SLOT_FILES),
    (truncate, JOURNAL),
    (truncate, HEADS),
    (remove, SLOT_FILES + JOURNAL + HEADS),
]


def test_no_damage_to_any_file_makes_the_store_serve_a_wrong_byte(tmp_path: Path) -> None:
    made, hurt = tmp_path / "made", tmp_path / "hurt"
    life = Life(5)
    store = make([made / "one", made / "two"], FaultyFiles())
    for count in (7, 7, 2, 7):
        life.write(store, count)
        life.remove(store, 2)
    store.close()

    choose = Random(11)
    fates: Counter[str] = Counter()
    for damage, names in DAMAGES:
        for _ in range(DAMAGES_OF_A_KIND):
            shutil.copytree(made, hurt)
            damage(hurt / choose.choice(names), choose)
            fates += outcome(hurt, life)
            shutil.rmtree(hurt)
    print(dict(fates))  # noqa: T201 - pytest -rP shows it
    assert fates["wrong blocks served"] == 0
    assert fates["damages"] == len(DAMAGES) * DAMAGES_OF_A_KIND
    assert min(fates["stores refused"], fates["blocks missing"], fates["blocks served"]) > 0


def outcome(place: Path, life: Life) -> Counter[str]:
    """What a check, a repair and the store itself make of the damaged store in *place*."""
    paths = [place / "one", place / "two"]
    fates = Counter(damages=1)
    try:
        report = check_store(paths)
        check_store(paths, repair=True, system=FaultyFiles())
        assert check_store(paths).sound
        store = make(paths, FaultyFiles())
    except FormatError:
        return fates + Counter({"stores refused": 1})
    found = read(store)
    assert store.statistics().corrupt_blocks == 0
    store.close()
    assert len(found) == sum(report.good_blocks.values())
    missing = len(life.stored.keys() - found.keys())
    assert report.sound <= (missing == 0), "the check missed a damage"
    return fates + Counter(
        {
            "blocks served": len(found),
            "blocks missing": missing,
            "wrong blocks served": life.wrong(found),
        }
    )
