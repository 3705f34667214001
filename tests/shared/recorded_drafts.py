"""Records what a drafter drafts, for tests that compare it with a reference."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill_execution.runners.device.device_drafter import DeviceDrafter
from pagemill_execution.runners.drafter import Drafted, Drafter
from pagemill_kernels.request_rows.layout import NUM_TOKENS

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


def record_device_drafts(monkeypatch: pytest.MonkeyPatch) -> Found:
    """`record_drafts` of a GPU's drafter."""
    found: Found = []
    run = DeviceDrafter.run

    def recorded(self: DeviceDrafter, drafts: Any, step: Any) -> Any:
        read, rows = run(self, drafts, step), dict(zip(step.request_ids, step.rows.tolist(), strict=True))
        lengths, tokens = self._state.records[:, NUM_TOKENS].clone(), self._state.tokens.clone()

        def reading() -> Drafted:
            assert read is not None
            result = read()
            for name, token_ids in result.token_ids.items():
                known = tokens[rows[name], : int(lengths[rows[name]])]
                found.append((tuple(known.tolist()), token_ids))
            return result

        return None if read is None else reading

    monkeypatch.setattr(DeviceDrafter, "run", recorded)
    return found
