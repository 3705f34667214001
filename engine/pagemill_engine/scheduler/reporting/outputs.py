"""Collects a step's outputs for clients as wire messages, so that nothing is copied twice."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from pagemill_engine.ipc.messages import LogprobsOut, TokensOut
from pagemill_engine.scheduler.beams import BeamSearch
from pagemill_engine.scheduler.sequence import Sequence
from pagemill_execution.step import TokenLogprobs
from pagemill_protocol.request.generate import FinishReason


class OutputQueue:
    def __init__(self) -> None:
        self._outputs: list[TokensOut] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def take(self) -> list[TokensOut]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_end(self, sequence: Sequence) -> bool:
        """Whether the sequence's last output is queued."""
        if sequence.search is not None:
            return sequence.search.end_reported
        return any(
            out.request_id == sequence.client_request_id
            and out.choice == sequence.choice
            and out.finish_reason is not None
            for out in self._outputs
        )

    def tokens(
        self,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: TokenLogprobs | None,
        finish_reason: FinishReason | None,
    ) -> None:
        if sequence.reported and logprobs is None:  # nearly always; this runs for every sequence of every step
            output = TokensOut(
                request_id=sequence.client_request_id,
                choice=sequence.choice,
                token_ids=token_ids,
                finish_reason=finish_reason,
                num_preemptions=sequence.num_preemptions,
            )
        else:
            output = _full(sequence, token_ids, logprobs, finish_reason)
            sequence.reported = True
        self._outputs.append(output)

    def verified(self, first: int, num_proposed: int, num_accepted: int) -> None:
        """Make one output of those from index `first` on, which have tokens of one sequence, of which some had been
        proposed."""
        outputs = self._outputs[first:]
        if not outputs:
            return
        begin, end = outputs[0], outputs[-1]
        logprobs = None if begin.logprobs is None else [entry for each in outputs for entry in each.logprobs or ()]
        self._outputs[first:] = [
            msgspec.structs.replace(
                begin,
                token_ids=[token_id for each in outputs for token_id in each.token_ids],
                logprobs=logprobs,
                num_proposed=num_proposed,
                num_accepted=num_accepted,
                finish_reason=end.finish_reason,
                error=end.error,
                error_code=end.error_code,
            )
        ]

    def pooled(self, sequence: Sequence, vector: bytes) -> None:
        """Queue the pooled vector of the sequence's prompt as its last output."""
        self._outputs.append(
            TokensOut(
                request_id=sequence.client_request_id,
                choice=sequence.choice,
                pooled=vector,
                finish_reason="stop",
                num_cached_tokens=sequence.num_cached_tokens,
                num_preemptions=sequence.num_preemptions,
                queue_s=_queue_s(sequence),
            )
        )

    def search(self, sequence: Sequence, search: BeamSearch[Sequence]) -> None:
        """Queue the best answers of a finished beam search. `sequence`: any of its sequences."""
        search.end_reported = True
        for choice, answer in zip(search.choices, search.pool, strict=False):
            entries = None
            if answer.logprobs is not None:
                entries = [LogprobsOut(each.token_ids, each.logprobs, each.rank) for each in answer.logprobs]
            self._outputs.append(
                TokensOut(
                    request_id=sequence.client_request_id,
                    choice=choice,
                    token_ids=answer.token_ids,
                    logprobs=entries,
                    finish_reason=answer.finish_reason,
                    num_cached_tokens=sequence.num_cached_tokens,
                    num_preemptions=sequence.num_preemptions,
                    queue_s=_queue_s(sequence),
                )
            )

    def end(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """End a choice without a new token: it was aborted, or was already complete when resumed."""
        for choice in _choices_to_end(sequence):
            self._outputs.append(
                TokensOut(
                    request_id=sequence.client_request_id,
                    choice=choice,
                    finish_reason=finish_reason,
                    num_preemptions=sequence.num_preemptions,
                )
            )

    def failure(self, sequence: Sequence, message: str) -> None:
        for choice in _choices_to_end(sequence):
            self._outputs.append(
                TokensOut(
                    request_id=sequence.client_request_id,
                    choice=choice,
                    finish_reason="error",
                    error=message,
                    error_code="internal_error",
                    num_preemptions=sequence.num_preemptions,
                )
            )


def _choices_to_end(sequence: Sequence) -> Collection[int]:
    """Return the choices to end, once: a search ends as a whole, whichever of its sequences ends first."""
    if sequence.search is None:
        return (sequence.choice,)
    choices = () if sequence.search.end_reported else sequence.search.choices
    sequence.search.end_reported = True
    return choices


def _full(
    sequence: Sequence, token_ids: list[int], logprobs: TokenLogprobs | None, finish_reason: FinishReason | None
) -> TokensOut:
    first = not sequence.reported
    entry = None
    if logprobs is not None:
        entry = [LogprobsOut(logprobs.token_ids, logprobs.logprobs, logprobs.rank)]
    return TokensOut(
        request_id=sequence.client_request_id,
        choice=sequence.choice,
        token_ids=token_ids,
        logprobs=entry,
        finish_reason=finish_reason,
        prompt_logprobs=sequence.prompt_report.take() if first and sequence.prompt_report is not None else [],
        num_cached_tokens=sequence.num_cached_tokens if first else 0,
        num_preemptions=sequence.num_preemptions,
        queue_s=_queue_s(sequence) if first else 0.0,
    )


def _queue_s(sequence: Sequence) -> float:
    return max(0.0, sequence.first_scheduled_s - sequence.arrival_s) if sequence.first_scheduled_s is not None else 0.0
