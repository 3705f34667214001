"""Inputs for comparisons of limit stores: limits of any kind, and steps of a caller's history."""

from __future__ import annotations

from hypothesis import strategies as st

from pagemill_servers.keys.caller import Limits

limits = st.builds(
    Limits,
    requests_per_minute=st.none() | st.integers(1, 6),
    tokens_per_minute=st.none() | st.integers(1, 300),
    concurrency=st.none() | st.integers(1, 4),
    tokens_per_day=st.none() | st.integers(1, 900),
    tokens_per_month=st.none() | st.integers(1, 900),
)
step = st.one_of(
    st.tuples(st.just("wait"), st.integers(1, 20_000)),
    st.tuples(st.just("reserve"), st.integers(0, 200)),
    st.tuples(st.just("extend"), st.integers(0, 200)),
    st.tuples(st.just("settle"), st.integers(0, 250)),
)
"""Milliseconds; requested tokens; further tokens after half of the reserved ones were used; used tokens."""


def sequences_of(tokens: int) -> int:
    """Return the number of sequences of a request for this number of tokens; some have several."""
    return 1 + tokens % 3
