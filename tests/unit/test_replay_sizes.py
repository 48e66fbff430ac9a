import pytest

from kvstrata.core.errors import ConfigError
from kvstrata.replay.sizes import Axis, Sizes, parse_axis, sizes_of

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "tier", "sizes_gib"),
    [
        ("host=16GiB..128GiB", "host", [16, 32, 64, 128]),
        ("host=16GiB..100GiB", "host", [16, 32, 64, 100]),
        (" disk=1TiB..9TiB:3 ", "disk", [1024, 3072, 9216]),
        ("host=1GiB..1.5GiB", "host", [1, 1.5]),
        ("host=1 GiB..2 gib:2", "host", [1, 2]),
    ],
)
def test_sizes_to_try_are_doubled_or_counted(text: str, tier: str, sizes_gib: list[float]) -> None:
    assert parse_axis(text) == Axis(tier, tuple(int(size * GIB) for size in sizes_gib))


@pytest.mark.parametrize(
    "text",
    ["", "host", "host=", "host=1GiB", "remote=1GiB..2GiB", "host=2GiB..1GiB", "host=1GiB..1GiB",
     "host=1GiB..2GiB:1", "host=1GiB..2GiB:65", "host=1GiB..2GiB:x", "host=1..2Gi", "disk=..2GiB"],
)  # fmt: skip
def test_what_are_no_sizes_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_axis(text)
    assert caught.value.hint


def test_every_combination_is_tried() -> None:
    host, disk = Axis("host", (1, 2)), Axis("disk", (10, 20))
    assert sizes_of(7, 70, []) == [Sizes(7, 70)]
    assert sizes_of(7, 70, [host]) == [Sizes(1, 70), Sizes(2, 70)]
    assert sizes_of(7, 70, [disk]) == [Sizes(7, 10), Sizes(7, 20)]
    assert sorted(sizes_of(7, 70, [disk, host])) == [
        Sizes(1, 10), Sizes(1, 20), Sizes(2, 10), Sizes(2, 20)
    ]  # fmt: skip


def test_a_tier_is_swept_once() -> None:
    with pytest.raises(ConfigError, match="names a tier twice"):
        sizes_of(7, 70, [Axis("host", (1, 2)), Axis("host", (3, 4))])
