"""Where a rank is in a step, as groups record it and messages name it."""

from __future__ import annotations

from typing import NamedTuple

STUCK_SECONDS = 5.0
"""How long a rank is waited for that comes to no further place."""
OUTSIDE, LOGITS, SEND, RECEIVE, PLAN, REPORT = range(-1, -7, -1)
"""Numbers of a layer that stand for places outside of the layers' call: a sum, the exchange of logits, hidden states
that go to or come from another rank (the cut), the wait for a plan, and the end of a step."""
_NAMES = {OUTSIDE: "a sum outside of the layers", LOGITS: "the logits", PLAN: "the plan ring", REPORT: "the end"}


class RankStatus(NamedTuple):
    """What a rank last did."""

    barriers: int
    step: int
    layer: int
    cut: int


def place_in_words(status: RankStatus, rank: int, *, has_stages: bool) -> str:
    if status.layer >= 0:
        stage = " of its stage" if has_stages else ""
        cut = f"cut {status.cut} of layer {status.layer}{stage}"
    elif status.layer == SEND:
        cut = f"hidden states from rank {rank} to {status.cut}"
    elif status.layer == RECEIVE:
        cut = f"hidden states from rank {status.cut} to {rank}"
    elif status.layer == OUTSIDE and status.cut >= 0:
        cut = f"exchange {status.cut}"
    else:
        cut = _NAMES[status.layer]
    return f"{cut} of step {status.step}"
