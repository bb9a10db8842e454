"""How objects are cut into parts, and what an ``s3://`` root may say. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toprope.store.errors import UsageError
from toprope.store.objects.parts import Limits, plan_parts
from toprope.store.objects.s3_location import parse_location

MIB = 1024 * 1024
TIB = MIB * MIB
LIMITS = Limits()


@pytest.mark.fault("B126")
@pytest.mark.parametrize(
    "size", [0, 1, 5 * MIB - 1, 5 * MIB, 16 * MIB, 16 * MIB + 1, 80 * 1024 * MIB, 200 * 1024 * MIB, 5 * TIB]
)
def test_part_numbers_never_run_out(size: int) -> None:
    parts = plan_parts(size, LIMITS)
    assert 1 <= len(parts) <= 10_000
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == size
    assert all(5 * MIB <= part.end - part.begin <= 5 * 1024 * MIB for part in parts[:-1])
    assert len(parts) == 1 or parts[-1].end > parts[-1].begin


@pytest.mark.fault("B126")
def test_what_is_too_large_is_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match=f"{5 * TIB + 1} bytes are too many.*at most {5 * TIB}"):
        plan_parts(5 * TIB + 1, LIMITS)


@given(size=st.integers(0, 10**6), part=st.integers(1, 1000), most=st.integers(1, 50), least=st.integers(1, 100))
def test_any_limits_are_kept(size: int, part: int, most: int, least: int) -> None:
    limits = Limits(
        part_bytes=part, min_part_bytes=least, max_part_bytes=5000, max_parts=most, max_object_bytes=100_000
    )
    try:
        parts = plan_parts(size, limits)
    except UsageError:
        assert size > 100_000 or size > 5000 * most
        return
    assert len(parts) <= most
    assert all(least <= one.end - one.begin <= 5000 for one in parts[:-1])
    assert sum(one.end - one.begin for one in parts) == size


def test_a_location_says_how_to_reach_the_bucket() -> None:
    where = parse_location(
        "s3://my-bucket/team/runs/?endpoint=http%3A%2F%2F127.0.0.1:9000/&region=eu-1&path_style=1&profile=p"
    )
    assert (where.bucket, where.prefix, where.endpoint) == ("my-bucket", "team/runs/", "http://127.0.0.1:9000")
    assert (where.region, where.path_style, where.profile) == ("eu-1", True, "p")
    assert parse_location("s3://my-bucket").prefix == ""
    assert parse_location("s3://my-bucket?endpoint=https://s3.example.com").endpoint == "https://s3.example.com"
    assert parse_location("s3://my-bucket?checksums=when_required").checksums == "when_required"


@pytest.mark.parametrize(
    "root",
    [
        "s3://",
        "s3:///prefix",
        "s3://B/x",
        "s3://key:CANARY@bucket/x",
        "s3://bucket:80/x",
        "s3://bucket/x#CANARY",
        "s3://bucket/../x",
        "s3://bucket//x",
        "s3://bucket/.x",
        "s3://bucket/x y",
        "s3://bucket/x?secret_key=CANARY",
        "s3://bucket/x?region",
        "s3://bucket/x?region=a&region=b",
        "s3://bucket/x?path_style=yes",
        "s3://bucket/x?checksums=no",
        "s3://bucket/x?profile=../x",
        "s3://bucket/x?endpoint=127.0.0.1:9000",
        "s3://bucket/x?endpoint=http://user:CANARY@host",
        "s3://bucket/x?endpoint=http://host:99999",
        "s3://bucket/x?endpoint=ftp://host",
    ],
)
def test_a_location_that_cannot_be_meant_is_refused_without_repeating_secrets(root: str) -> None:
    with pytest.raises(UsageError, match="not usable") as caught:
        parse_location(root)
    assert "CANARY" not in str(caught.value)
    assert "\n" not in str(caught.value)
