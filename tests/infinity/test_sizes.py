"""Sizes: what people write is read exactly, what could mean two things is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from infinity.sizes import GIB, KIB, MIB, TIB, Nbytes, NbytesOrZero, format_minimum_nbytes, format_nbytes, parse_nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("1_000", 1000),
        ("512MiB", 512 * MIB),
        ("20GiB", 20 * GIB),
        (" 20 gib ", 20 * GIB),
        ("1.5GB", 1_500_000_000),
        ("1.1TB", 1_100_000_000_000),
        ("0.5KiB", 512),
        ("2TiB", 2 * TIB),
        ("1PiB", 1024 * TIB),
        ("64KiB", 64 * KIB),
        ("6.3MiB", 6_606_028),  # 6,606,028.8
        ("0.1GiB", 107_374_182),  # 107,374,182.4
        ("1.0001KB", 1000),
    ],
)
def test_parse_reads_exactly(text: object, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("20G", "did you mean 20GiB or 20GB"),
        ("1.5m", "did you mean 1.5MiB or 1.5MB"),
        ("3Qib", "unknown unit 'Qib'"),
        ("0.3B", "whole number of bytes"),
        ("10.5B", "whole number of bytes"),
        ("10.5", "whole number of bytes"),
        ("0.0001KiB", "whole number of bytes"),
        ("-1GiB", "cannot read"),
        ("", "cannot read"),
        ("1e9", "unknown unit|cannot read"),
        ("GiB", "cannot read"),
        ("1 2 GiB", "cannot read"),
        (-1, "negative"),
        (1.5, "float"),
        (True, "bool"),
        (None, "NoneType"),
    ],
)
def test_parse_refuses_and_says_what_is_allowed(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_nbytes(value)
    assert '"512MiB"' in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (20 * GIB, "20 GiB"),
        (512 * MIB, "512 MiB"),
        (int(1.25 * GIB), "1.25 GiB"),
        (int(12.34 * TIB), "12.3 TiB"),
        (-MIB, "-1 MiB"),
        (5000 * 1024 * TIB, "5000 PiB"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_formatted_text_reads_back_within_its_precision(nbytes: int) -> None:
    number, unit = format_nbytes(nbytes).split(" ")
    back = float(number) * parse_nbytes(f"1{unit}")
    assert abs(back - nbytes) <= 0.006 * nbytes


@given(st.integers(min_value=0, max_value=2**60))
def test_a_minimum_that_is_printed_is_one_that_is_enough(nbytes: int) -> None:
    assert nbytes <= parse_nbytes(format_minimum_nbytes(nbytes)) <= 1.01 * nbytes


def test_a_minimum_is_printed_rounded_up() -> None:
    texts = {110_149_632: "106 MiB", 105 * MIB: "105 MiB", 1024 * MIB - 1: "1024 MiB", 10 * MIB - 1: "10 MiB", 7: "7 B"}
    assert {nbytes: format_minimum_nbytes(nbytes) for nbytes in texts} == texts


def test_field_types() -> None:
    assert TypeAdapter(Nbytes).validate_python("1KiB") == KIB
    assert TypeAdapter(NbytesOrZero).validate_python(0) == 0
    with pytest.raises(ValidationError):
        TypeAdapter(Nbytes).validate_python("0GiB")
