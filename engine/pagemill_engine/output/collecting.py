"""Collects the engine's outputs of one request of the offline API into its `RequestOutput`.

`LLM` reads it once at the end, `AsyncLLM` whenever its caller is ready for more (`take`). Text and stop strings come
from `output.choice`, as in the server; `output.processor` is the server's counterpart, which renders bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.messages import LogprobsOut, TokensOut
from pagemill_engine.output.best_of import MeanLogprob, best
from pagemill_engine.output.choice import ChoiceOutput
from pagemill_engine.output.results import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import RequestOutputKind


class CollectedRequest:
    """One prompt while it is generated. `output` contains everything generated so far."""

    def __init__(self, request: GenerateRequest, text: str | None, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self._tokenizer = tokenizer
        self._sampling = sampling
        reported = range(sampling.num_reported)
        self._choices = [ChoiceOutput(tokenizer, request.prompt_token_ids, sampling) for _ in reported]
        self._likelihoods = [MeanLogprob() for _ in reported] if len(reported) > sampling.n else []
        self._taken = [(0, 0) for _ in reported]
        """Number of characters and tokens of each choice that `take` has returned."""
        self._metrics = RequestMetrics(time.time())
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[self._empty(index) for index in reported],
            prompt_logprobs=None if sampling.prompt_logprobs is None else [None],
            metrics=self._metrics,
        )

    @property
    def finished(self) -> bool:
        return self.output.finished

    def push(self, out: TokensOut) -> bool:
        """Add one engine output.

        Returns whether a stop string ended the choice, which the engine cannot know.
        """
        choice, output = self._choices[out.choice], self.output.outputs[out.choice]
        if output.finished():
            return False
        self._note_times(out)
        if out.error is not None:
            output.finish_reason, output.stop_reason = "error", out.error
            self._end_if_complete()
            return False
        if out.choice == 0:
            self.output.num_cached_tokens = max(self.output.num_cached_tokens, out.num_cached_tokens)
        if self.output.prompt_logprobs is not None:
            self.output.prompt_logprobs += [dict(self._position(entry)) for entry in out.prompt_logprobs]
        delta = choice.push(out.token_ids, out.logprobs, out.finish_reason)
        output.text += delta.text if self._sampling.detokenize else ""
        output.token_ids += delta.token_ids
        output.finish_reason = delta.finish_reason
        output.stop_reason = choice.stop_reason
        self._add_logprobs(output, delta.logprobs)
        if self._likelihoods:
            self._likelihoods[out.choice].add(delta.logprobs)
        self._end_if_complete()
        return choice.stopped_by_text

    def take(self) -> RequestOutput | None:
        """Return the output that the caller has not seen, in the request's `output_kind`; None if there is none yet."""
        kind = self._sampling.output_kind
        if not self.finished and (kind is RequestOutputKind.FINAL_ONLY or self._likelihoods):
            return None
        outputs = self.output.outputs
        if kind is RequestOutputKind.DELTA:
            shown = [self._delta(output) for output in outputs if self._is_news(output) or self.finished]
        else:
            shown = [_copy(output) for output in outputs]
        if not (self.finished or any(self._is_news(output) for output in outputs)):
            return None
        self._taken = [(len(output.text), len(output.token_ids)) for output in outputs]
        return replace(self.output, outputs=shown)

    def abort(self) -> None:
        """End all running choices as they are."""
        for output in self.output.outputs:
            output.finish_reason = output.finish_reason or "abort"
        self._end_if_complete()

    def _is_news(self, output: CompletionOutput) -> bool:
        return (len(output.text), len(output.token_ids)) != self._taken[output.index]

    def _delta(self, output: CompletionOutput) -> CompletionOutput:
        num_chars, num_tokens = self._taken[output.index]
        logprobs = None if output.logprobs is None else output.logprobs[num_tokens:]
        return replace(output, text=output.text[num_chars:], token_ids=output.token_ids[num_tokens:], logprobs=logprobs)

    def _note_times(self, out: TokensOut) -> None:
        metrics, now_s = self._metrics, time.time()
        if metrics.time_in_queue is None:
            metrics.time_in_queue = out.queue_s
            metrics.first_scheduled_time = metrics.arrival_time + out.queue_s
        if out.token_ids:
            if metrics.first_token_time is None:
                metrics.first_token_time = now_s
                metrics.first_token_latency = now_s - metrics.arrival_time
            metrics.last_token_time = now_s
            metrics.num_generation_tokens += len(out.token_ids)
            metrics.num_proposed_tokens += out.num_proposed
            metrics.num_accepted_tokens += out.num_accepted

    def _end_if_complete(self) -> None:
        candidates = self.output.outputs
        if not all(output.finished() for output in candidates):
            return
        self.output.finished = True
        self._metrics.finished_time = time.time()
        if self._likelihoods:
            self.output.outputs = [candidates[at] for at in best(self._likelihoods, self._sampling.n)]
            for index, output in enumerate(self.output.outputs):
                output.index = index

    def _add_logprobs(self, output: CompletionOutput, entries: Sequence[LogprobsOut]) -> None:
        if output.logprobs is None or output.cumulative_logprob is None:
            return
        for entry in entries:
            output.cumulative_logprob += entry.logprobs[0]
            output.logprobs.append(dict(self._position(entry)))

    def _position(self, entry: LogprobsOut) -> Iterator[tuple[int, Logprob]]:
        chosen = entry.token_ids[0]
        yield chosen, Logprob(entry.logprobs[0], entry.rank, self._tokenizer.token_text(chosen))
        alternatives = zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
        for rank, (token_id, logprob) in enumerate(alternatives, start=1):
            if token_id != chosen:
                yield token_id, Logprob(logprob, rank, self._tokenizer.token_text(token_id))

    def _empty(self, index: int) -> CompletionOutput:
        if self._sampling.num_alternatives is None:
            return CompletionOutput(index)
        return CompletionOutput(index, cumulative_logprob=0.0, logprobs=[])


def _copy(output: CompletionOutput) -> CompletionOutput:
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return replace(output, token_ids=list(output.token_ids), logprobs=logprobs)
