"""JSON in pieces: the same bytes as written at once, with each shared piece kept once."""

from __future__ import annotations

from itertools import chain

import orjson
from hypothesis import given
from hypothesis import strategies as st

from pagemill_protocol.json_pieces import (
    PIECE_BYTES,
    JsonPieces,
    JsonRows,
    array_pieces,
    in_blocks,
    joined_array,
    string_pieces,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def rows_of(values: list[object]) -> JsonRows:
    rows = JsonRows()
    for value in values:
        rows.add(orjson.dumps(value))
    return rows


@given(st.lists(TEXTS), st.lists(TEXTS))
def test_an_array_of_two_parts_is_the_array_of_all_their_rows(first: list[str], second: list[str]) -> None:
    pieces = array_pieces(rows_of(list(first)), None, rows_of(list(second)))
    assert orjson.loads(b"".join(pieces)) == [*first, *second]
    assert orjson.dumps({"all": joined_array(rows_of(list(first)))}) == orjson.dumps({"all": first})


@given(TEXTS, TEXTS, TEXTS)
def test_parts_stand_where_they_were_put_whatever_the_texts_around_them(echo: str, text: str, other: str) -> None:
    json, shared = JsonPieces(), string_pieces(echo)
    value = {"b": json.text(text, shared), "a\0": other, "list": [json.part([b"1", b"2"]), json.text("", shared)]}
    assert orjson.loads(b"".join(json.write(value))) == {"b": echo + text, "a\0": other, "list": [12, echo]}


def test_a_text_that_several_strings_begin_with_is_kept_once() -> None:
    json, shared = JsonPieces(), string_pieces("x" * 1000)
    pieces = json.write([json.text(str(index), shared) for index in range(100)])
    assert sum(piece is shared[0] for piece in pieces) == 100
    assert sum(map(len, {id(piece): piece for piece in pieces}.values())) < 3000


def test_many_rows_are_kept_in_pieces_of_bounded_size() -> None:
    rows = rows_of(["x" * 1000] * 1000)
    assert len(rows.pieces) == 16
    assert max(map(len, rows.pieces)) < PIECE_BYTES + 1100
    assert rows.num_bytes == len(b"".join(rows.pieces)) + 1


@given(st.lists(st.binary(max_size=40)), st.integers(1, 16))
def test_blocks_have_the_same_bytes_and_are_full_except_the_last(pieces: list[bytes], size: int) -> None:
    blocks = list(in_blocks(pieces, size))
    assert b"".join(blocks) == b"".join(pieces)
    assert all(len(block) == size for block in blocks[:-1])
    assert all(0 < len(block) <= size for block in chain(blocks[-1:]))
