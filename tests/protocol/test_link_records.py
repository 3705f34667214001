"""Records of a link do not depend on how the bytes are cut, and invalid ones are refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_protocol.frames import FrameError
from pagemill_protocol.link import (
    MAX_RECORD_BYTES,
    PIECE_BYTES,
    RecordDecoder,
    RecordKind,
    decode_number,
    encode_number,
    encode_pieces,
    encode_record,
)

RECORDS = st.lists(
    st.tuples(st.sampled_from(RecordKind), st.integers(0, 2**32 - 1), st.binary(max_size=400)), max_size=6
)


@given(RECORDS, st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_records_do_not_depend_on_how_the_bytes_are_cut(
    records: list[tuple[RecordKind, int, bytes]], cuts: list[int]
) -> None:
    rest = b"".join(encode_record(*record) for record in records)
    decoder, found, number = RecordDecoder(), [], 0
    while rest:
        size = cuts[number % len(cuts)]
        found += decoder.feed(rest[:size])
        rest, number = rest[size:], number + 1
    assert found == records


def test_large_data_is_split_into_several_records_of_the_same_stream() -> None:
    data = bytes(range(256)) * 1000
    records = RecordDecoder().feed(b"".join(encode_pieces(RecordKind.DATA, 7, data)))
    assert {(kind, stream) for kind, stream, _ in records} == {(RecordKind.DATA, 7)}
    assert b"".join(piece for _, _, piece in records) == data
    assert max(len(piece) for _, _, piece in records) == PIECE_BYTES


def test_a_record_that_announces_too_many_bytes_is_refused_before_it_arrives() -> None:
    with pytest.raises(FrameError, match="announces"):
        RecordDecoder().feed(struct.pack("<IIB", MAX_RECORD_BYTES + 1, 1, RecordKind.DATA))


def test_a_credit_is_a_number_of_bytes() -> None:
    ((kind, stream, data),) = RecordDecoder().feed(encode_number(RecordKind.CREDIT, 3, 70_000))
    assert (kind, stream, decode_number(data)) == (RecordKind.CREDIT, 3, 70_000)
    with pytest.raises(FrameError):
        decode_number(b"123")
