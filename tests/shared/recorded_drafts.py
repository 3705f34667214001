"""Records what a drafter drafts, for tests that compare it with a reference."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill_execution.runners.drafter import Drafter

Found = list[tuple[tuple[int, ...], list[int]]]
"""The known tokens of a request, and what was drafted behind them."""


def record_drafts(monkeypatch: pytest.MonkeyPatch) -> Found:
    """Return a list to which each run of a drafter adds its drafts."""
    found: Found = []
    run = Drafter.run

    def recorded(self: Drafter, inputs: Any, drafts: Any, last: Any) -> Any:
        result = run(self, inputs, drafts, last)
        for name, token_ids in result.token_ids.items():
            row = self._rows.row(name)
            known = self._rows.token_ids[row, : self._rows.num_tokens[row]]
            found.append((tuple(known.tolist()), token_ids))
        return result

    monkeypatch.setattr(Drafter, "run", recorded)
    return found
