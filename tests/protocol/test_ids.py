"""Ids of requests: of one form, no two alike, also not in processes that have one origin."""

from __future__ import annotations

import multiprocessing
import re

from pagemill_protocol.ids import new_id


def test_ids_are_128_bits_in_hex_and_differ() -> None:
    ids = [new_id() for _ in range(1000)]
    assert all(re.fullmatch(r"[0-9a-f]{32}", each) for each in ids)
    assert len(set(ids)) == len(ids)


def test_a_forked_process_draws_ids_of_its_own() -> None:
    new_id()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        theirs = pool.map(_draw, range(8), chunksize=1)
    assert len({*theirs, *(new_id() for _ in range(8))}) == 16


def _draw(_: int) -> str:
    return new_id()
