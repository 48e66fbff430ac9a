import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.core.errors import ConfigError
from kvstrata.core.units import exact_bytes, human_bytes, parse_bytes


@pytest.mark.parametrize(
    ("spelled", "count"),
    [
        ("4096", 4096),
        (4097, 4097),
        ("1b", 1),
        ("1KiB", 1024),
        ("8GiB", 8_589_934_592),
        (" 8 gib ", 8_589_934_592),
        ("1.5TiB", 1_649_267_441_664),
        ("200GB", 200_000_000_000),
        ("3MB", 3_000_000),
        ("0.1KB", 100),
        ("2PiB", 2_251_799_813_685_248),
        ("9223372036854775807", 9_223_372_036_854_775_807),
    ],
)
def test_a_size_is_a_number_and_a_unit(spelled: object, count: int) -> None:
    assert parse_bytes(spelled) == count


@pytest.mark.parametrize(
    "spelled",
    ["", "GiB", "-1GiB", "0", "0.1", "1e9", "8 Gi B", "8GiBB", "\u0661GiB", "1_000", "9223372036854775808",
     "9000000PiB", "1" * 5000, -5, 1.5, True, None, [], b"8GiB"],
)  # fmt: skip
def test_what_is_not_a_size_is_refused_with_a_remedy(spelled: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(spelled)
    assert caught.value.hint


def test_a_unit_that_could_be_a_power_of_1000_or_1024_is_refused_and_both_are_offered() -> None:
    with pytest.raises(ConfigError, match="unknown unit 'G'") as caught:
        parse_bytes("8G")
    assert caught.value.hint == "write 8GiB (powers of 1024) or 8GB (powers of 1000)"


@given(
    st.integers(1, 2**63 - 1)
    | st.builds(lambda n, p: n * 1024**p, st.integers(1, 512), st.integers(0, 5))
)
def test_the_exact_spelling_reads_back_unchanged(count: int) -> None:
    assert parse_bytes(exact_bytes(count)) == count


@pytest.mark.parametrize(
    ("count", "exact", "human"),
    [
        (0, "0B", "0 B"),
        (1023, "1023B", "1023 B"),
        (1024, "1KiB", "1.0 KiB"),
        (1536, "1536B", "1.5 KiB"),
        (64 * 2**30, "64GiB", "64.0 GiB"),
        (3 * 2**40, "3TiB", "3.0 TiB"),
    ],
)
def test_sizes_are_spelled_exactly_for_machines_and_roughly_for_people(
    count: int, exact: str, human: str
) -> None:
    assert exact_bytes(count) == exact
    assert human_bytes(count) == human
