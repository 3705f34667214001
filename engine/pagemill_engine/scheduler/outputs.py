"""Collects what a step has to say to clients, in the wire's own type so that nothing is copied twice."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_engine.ipc.messages import LogprobsOut, TokensOut
from pagemill_engine.scheduler.beams import BeamSearch
from pagemill_engine.scheduler.request import Request
from pagemill_engine.scheduler.step import TokenLogprobs
from pagemill_protocol.generate import FinishReason


class OutputBox:
    def __init__(self) -> None:
        self._outputs: list[TokensOut] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def take(self) -> list[TokensOut]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_end(self, row: Request) -> bool:
        """The row's last output is here already."""
        if row.search is not None:
            return row.search.told
        return any(
            out.request_id == row.client_request_id and out.choice == row.choice and out.finish_reason is not None
            for out in self._outputs
        )

    def token(
        self, row: Request, token_id: int, logprobs: TokenLogprobs | None, finish_reason: FinishReason | None
    ) -> None:
        if row.reported and logprobs is None:  # nearly always: it runs for every row of every step
            output = TokensOut(
                request_id=row.client_request_id,
                choice=row.choice,
                token_ids=[token_id],
                finish_reason=finish_reason,
                num_preemptions=row.num_preemptions,
            )
        else:
            output = _full(row, token_id, logprobs, finish_reason)
            row.reported = True
        self._outputs.append(output)

    def search(self, row: Request, search: BeamSearch) -> None:
        """A beam search is over: its best answers, whole. `row`: any of its rows."""
        search.told = True
        for choice, answer in zip(search.choices, search.pool, strict=False):
            entries = None
            if answer.logprobs is not None:
                entries = [LogprobsOut(each.token_ids, each.logprobs, each.rank) for each in answer.logprobs]
            self._outputs.append(
                TokensOut(
                    request_id=row.client_request_id,
                    choice=choice,
                    token_ids=answer.token_ids,
                    logprobs=entries,
                    finish_reason=answer.finish_reason,
                    num_cached_tokens=row.num_cached_tokens,
                    num_preemptions=row.num_preemptions,
                    queue_s=_queue_s(row),
                )
            )

    def end(self, row: Request, finish_reason: FinishReason) -> None:
        """A choice ends without a new token: aborted, or resumed when it was already complete."""
        for choice in _choices_to_end(row):
            self._outputs.append(
                TokensOut(
                    request_id=row.client_request_id,
                    choice=choice,
                    finish_reason=finish_reason,
                    num_preemptions=row.num_preemptions,
                )
            )

    def failure(self, row: Request, message: str) -> None:
        for choice in _choices_to_end(row):
            self._outputs.append(
                TokensOut(
                    request_id=row.client_request_id,
                    choice=choice,
                    finish_reason="error",
                    error=message,
                    error_code="internal_error",
                    num_preemptions=row.num_preemptions,
                )
            )


def _choices_to_end(row: Request) -> Sequence[int]:
    """A search ends as a whole, once, whichever of its rows it ends with."""
    if row.search is None:
        return (row.choice,)
    choices = () if row.search.told else row.search.choices
    row.search.told = True
    return choices


def _full(row: Request, token_id: int, logprobs: TokenLogprobs | None, finish_reason: FinishReason | None) -> TokensOut:
    first = not row.reported
    entry = None
    if logprobs is not None:
        entry = [LogprobsOut(logprobs.token_ids, logprobs.logprobs, logprobs.rank)]
    return TokensOut(
        request_id=row.client_request_id,
        choice=row.choice,
        token_ids=[token_id],
        logprobs=entry,
        finish_reason=finish_reason,
        num_cached_tokens=row.num_cached_tokens if first else 0,
        num_preemptions=row.num_preemptions,
        queue_s=_queue_s(row) if first else 0.0,
    )


def _queue_s(row: Request) -> float:
    return max(0.0, row.first_scheduled_s - row.arrival_s) if row.first_scheduled_s is not None else 0.0
