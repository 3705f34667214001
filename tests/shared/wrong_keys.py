"""Values of `Authorization` that differ from the right one, however similar they are."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagemill_servers.auth import hash_key

LATIN = st.text(st.characters(min_codepoint=33, max_codepoint=255, exclude_characters="\x7f"), max_size=60).map(
    lambda text: text.encode("latin-1")
)


def wrong_keys(key: str) -> SearchStrategy[bytes]:
    """Return a strategy for all values except `Bearer KEY`."""
    right = key.encode()
    near = [
        b"Bearer",
        b"Bearer ",
        b"Basic " + right,
        right,
        b"Bearer " + right[:-1],
        b"Bearer " + right + b"0",
        b"Bearer " + right.upper(),
        b"Bearer " + hash_key(key).encode(),
        b"Bearer " + b"k" * 513,
        b"Bearer " + b"k" * 60_000,
        b"Bearer " + right + b", Bearer " + right,
        b"Bearer * KEYS",
    ]
    made_up = st.one_of(LATIN.map(lambda made: b"Bearer " + made), LATIN, st.sampled_from(near))
    return made_up.filter(lambda value: value != b"Bearer " + right)
