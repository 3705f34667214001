"""Admission of requests: checks a client request and builds its sequences. Queueing them is `scheduler.scheduler`'s
part."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from pagemill_engine.limits import SchedulerLimits
from pagemill_engine.scheduler.beams import BeamSearch, most_blocks, num_candidates
from pagemill_engine.scheduler.prompt_report import PromptLogprobs
from pagemill_engine.scheduler.restriction import restriction_of
from pagemill_engine.scheduler.sequence import Sequence
from pagemill_engine.scheduler.token_masks import begin
from pagemill_protocol import hashes
from pagemill_protocol.errors import PagemillError, context_length_exceeded, invalid_field, unavailable
from pagemill_protocol.report.cache_kinds import most_held
from pagemill_protocol.request.continuing import needs_prompt_logprobs
from pagemill_protocol.request.generate import (
    MAX_REUSE_POINTS,
    ChoiceResume,
    GenerateRequest,
    check_answer,
    most_tokens_of_values,
)
from pagemill_protocol.request.pooling import check_task
from pagemill_protocol.request.sampling import MAX_PRIORITY, MIN_PRIORITY, SamplingParams, stream_conflict

if TYPE_CHECKING:
    from pagemill_engine.grammar.token_state import TokenStates

_SEED_BITS = 63


class Admission:
    """Builds sequences. It numbers arrivals, so that their order does not depend on clocks."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._num_arrivals = 0
        self._cache_root = lru_cache(maxsize=4096)(self._compute_cache_root)

    def admit(
        self, request: GenerateRequest, grammar: TokenStates | None = None, *, now_s: float, num_waiting: int
    ) -> list[Sequence]:
        """Return one sequence per choice that is not finished yet, in order of choice. Raises `PagemillError`."""
        self.check(request, num_waiting)
        sampling = request.sampling
        self._num_arrivals += 1
        if sampling.use_beam_search:
            return [self._search_root(request, now_s)]
        seed = sampling.seed if sampling.seed is not None else self._limits.seed
        if seed is None:
            seed = secrets.randbits(_SEED_BITS)
        resumes = {resume.index: resume for resume in request.resume}
        first = request.prompt_index * sampling.num_sequences
        sequences = [
            self._sequence(request, choice, resumes.get(choice), seed, now_s)
            for choice in range(first, first + sampling.num_sequences)
            if choice not in resumes or not resumes[choice].finished
        ]
        report = PromptLogprobs(request.num_prompt_logprobs or 0) if needs_prompt_logprobs(request) else None
        restriction = restriction_of(sampling, self._limits.vocab_size)
        for sequence in sequences:
            sequence.prompt_report = report
            sequence.restriction = restriction
            if grammar is not None:
                self._form(sequence, grammar)
            begin(sequence)
        return sequences

    def check(self, request: GenerateRequest, num_waiting: int) -> None:
        """Raise the `PagemillError` that `admit` would raise, without building sequences."""
        if request.adapter_digest and not self._limits.serves_adapters:
            raise adapter_not_served(
                "This engine serves no adapters. Ask for the model itself, or an engine that has them."
            )
        _check_priority(request.priority)
        _check_allowance(request.token_allowance)
        check_task(request.pooling, self._limits.pooling)
        self._check_prompt(request)
        self._check_resume(request)
        self._check_choosing(request)
        num_sequences, room = request.sampling.num_sequences, self._limits.max_num_waiting
        if num_sequences > room:
            raise wider_than_queue("n" if request.sampling.best_of is None else "best_of", num_sequences, room)
        if num_waiting + num_sequences > room:
            raise _queue_full(num_waiting, room)

    def raise_allowance(self, sequences: Iterable[Sequence], allowance: int) -> None:
        """Let each sequence generate up to `allowance` tokens.

        A limit is never lowered and never exceeds what the request asked for. Beam searches keep their length.
        """
        for sequence in sequences:
            if sequence.search is None:
                most = self._most_tokens(sequence.num_prompt_tokens, sequence.sampling, allowance)
                sequence.max_total_tokens = max(sequence.max_total_tokens, most)

    def _search_root(self, request: GenerateRequest, now_s: float) -> Sequence:
        """Build the only sequence that a beam search starts with: the prompt. The other beams fork from it."""
        root = self._sequence(request, 0, None, seed=0, now_s=now_s)
        root.search = BeamSearch(root, request.sampling, request.prompt_index * request.sampling.n)
        return root

    def _sequence(
        self, request: GenerateRequest, choice: int, resume: ChoiceResume | None, seed: int, now_s: float
    ) -> Sequence:
        sampling = request.sampling
        prompt = request.prompt_token_ids
        resumed = resume.token_ids if resume is not None else []
        eos_token_ids = [] if sampling.ignore_eos else self._limits.eos_token_ids
        stop_ids = frozenset(eos_token_ids).union(sampling.stop_token_ids)
        return Sequence(
            request_id=sequence_id(request.request_id, choice),
            client_request_id=request.request_id,
            choice=choice,
            arrival=self._num_arrivals,
            arrival_s=now_s,
            priority=request.priority,
            token_ids=[*prompt, *resumed],
            num_prompt_tokens=len(prompt),
            sampling=_engine_sampling(sampling, len(stop_ids), self._limits.vocab_size),
            seed=seed,
            max_total_tokens=self._max_total_tokens(request),
            stop_ids=stop_ids,
            eos_token_ids=eos_token_ids,
            noise=choice % sampling.num_sequences,
            cache_root=self._cache_root(request.cache_salt, request.adapter_digest),
            adapter_digest=request.adapter_digest,
            num_resumed_tokens=len(resumed),
            predicted_token_ids=request.predicted_token_ids[: self._limits.max_model_len],
            reuse_points=tuple(request.reuse_points[:MAX_REUSE_POINTS]),
            pooling=request.pooling,
            reads_all=self._limits.pooling is not None and self._limits.pooling.reads_all,
        )

    def _form(self, sequence: Sequence, grammar: TokenStates) -> None:
        """Set the sequence's grammar state, advanced over the tokens that another engine generated."""
        resumed = sequence.token_ids[sequence.num_prompt_tokens :]
        if resumed and resumed[-1] in sequence.stop_ids:
            resumed.pop()
        sequence.grammar = grammar.state(resumed, forbids_end=sequence.sampling.ignore_eos)

    def _max_total_tokens(self, request: GenerateRequest) -> int:
        num_prompt_tokens, most = len(request.prompt_token_ids), self._limits.max_total_tokens
        if request.sampling.max_tokens is None:
            fitting = most_tokens_of_values(request, self._limits.max_answer_values)
            most = most if fitting is None else min(most, num_prompt_tokens + max(1, fitting))
        return min(most, self._most_tokens(num_prompt_tokens, request.sampling, request.token_allowance))

    def _most_tokens(self, num_prompt_tokens: int, sampling: SamplingParams, allowance: int | None) -> int:
        """Return the number of tokens, prompt included, at which a sequence ends with reason `length`."""
        bounds = [num_prompt_tokens + each for each in (sampling.max_tokens, allowance) if each is not None]
        return min([self._limits.max_total_tokens, *bounds])

    def _check_prompt(self, request: GenerateRequest) -> None:
        limits = self._limits
        request.sampling.validate(limits.vocab_size)
        prompt = request.prompt_token_ids
        if not prompt:
            raise invalid_field("prompt", "The prompt has no tokens. Send at least one.")
        if len(prompt) > limits.max_prompt_tokens:
            raise context_length_exceeded(len(prompt), limits.max_model_len, _prompt_param(request))
        if len(prompt) > limits.cache_tokens:
            raise _larger_than_cache(len(prompt), limits, _prompt_param(request))
        _check_vocabulary(prompt, "prompt", limits.vocab_size)
        _check_vocabulary(request.predicted_token_ids, "prediction", limits.vocab_size)
        check_answer([request], limits.max_answer_values)

    def _check_choosing(self, request: GenerateRequest) -> None:
        """Refuse streaming, resuming and too many blocks for requests whose answers are chosen only at the end."""
        sampling, limits = request.sampling, self._limits
        if sampling.num_sequences == sampling.n and not sampling.use_beam_search:
            return
        conflict = stream_conflict(
            use_beam_search=sampling.use_beam_search, num_sequences=sampling.num_sequences, n=sampling.n
        )
        if request.stream and conflict is not None:
            raise invalid_field("stream", conflict)
        if request.resume:
            raise invalid_field("resume", "Beams and the candidates of best_of cannot be continued. Send it anew.")
        if not sampling.use_beam_search:
            return
        num_prompt_tokens, total = len(request.prompt_token_ids), self._max_total_tokens(request)
        num_blocks = most_blocks(sampling, num_prompt_tokens, total, limits.block_size)
        for kind, most in zip(limits.kinds, limits.blocks_of_kinds, strict=True):
            needed = num_blocks
            if not kind.keeps_all:  # each beam may have its window or state, and copies its last block before it writes
                of_beam = most_held(kind, 0, total, 1, limits.block_size) + 1
                needed = min(num_blocks, sampling.num_sequences * of_beam)
            if needed > most:
                raise _search_too_large(sampling.num_sequences, total - num_prompt_tokens, needed, most, limits)

    def _check_resume(self, request: GenerateRequest) -> None:
        num_choices = request.sampling.num_sequences
        for resume in request.resume:
            _check_choice(resume, request.prompt_index * num_choices, num_choices)
            _check_vocabulary(resume.token_ids, "resume", self._limits.vocab_size)
        if len({resume.index for resume in request.resume if resume.finished}) == num_choices:
            raise invalid_field("resume", "Every choice of this request is finished; there is nothing to resume.")

    def _compute_cache_root(self, salt: str, adapter_digest: str) -> bytes:
        return hashes.root_hash(
            weights_digest=self._limits.weights_digest,
            kv_dtype=self._limits.kv_dtype,
            block_size=self._limits.block_size,
            adapter_digest=adapter_digest,
            salt=salt,
        )


def _engine_sampling(sampling: SamplingParams, num_stop_ids: int, vocab_size: int) -> SamplingParams:
    """Return the sampling parameters of a sequence.

    Choosing among several sequences needs log probabilities even if the client did not ask for them.
    """
    if sampling.use_beam_search:
        num_top = num_candidates(sampling, num_stop_ids, vocab_size)
        return msgspec.structs.replace(sampling, temperature=0.0, min_tokens=0, logprobs=num_top)
    if sampling.num_sequences > sampling.n and sampling.num_alternatives is None:
        return msgspec.structs.replace(sampling, logprobs=0)
    return sampling


def adapter_not_served(message: str) -> PagemillError:
    """Return a 409: another engine may serve the adapter, so a gateway tries the next one."""
    return PagemillError(message, status=409, param="model", code="adapter_not_served")


def already_served(request_id: str) -> PagemillError:
    return invalid_field("request_id", f"Request {request_id[:80]} is already being served here.")


def sequence_id(client_request_id: str, choice: int) -> str:
    return f"{client_request_id}/{choice}"


def _prompt_param(request: GenerateRequest) -> str:
    from pagemill_api.dialects.registry import dialect_of  # imports the dialects' schemas, which only errors need

    return dialect_of(request.dialect).prompt_field


def _check_priority(priority: int) -> None:
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        message = f"priority must be an integer from {MIN_PRIORITY} to {MAX_PRIORITY}, got {priority}."
        raise invalid_field("priority", f"{message} Smaller is served first.")


def _check_allowance(allowance: int | None) -> None:
    if allowance is not None and allowance < 1:
        raise invalid_field("token_allowance", f"token_allowance must be at least 1, got {allowance}.")


def _check_vocabulary(token_ids: list[int], param: str, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary, which would fail the whole step."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise invalid_field(param, f"{param} holds token id {wrong}; this model's ids go from 0 to {vocab_size - 1}.")


def _check_choice(resume: ChoiceResume, first: int, num_choices: int) -> None:
    if not first <= resume.index < first + num_choices:
        raise invalid_field(
            "resume", f"resume names choice {resume.index}; choices go from {first} to {first + num_choices - 1}."
        )


def _larger_than_cache(num_prompt_tokens: int, limits: SchedulerLimits, param: str) -> PagemillError:
    room = limits.cache_tokens
    return PagemillError(
        f"The prompt has {num_prompt_tokens} tokens and the KV cache of this engine holds {room} "
        f"({room // limits.block_size} blocks of {limits.block_size}). Shorten the prompt, or raise kvCacheMemory.",
        param=param,
        code="context_length_exceeded",
    )


def _search_too_large(
    width: int, num_tokens: int, num_blocks: int, most: int, limits: SchedulerLimits
) -> PagemillError:
    """Return a 400: the beams of a search advance together, so all of them must fit into the cache at once."""
    return invalid_field(
        "beam_width",
        f"A search of {width} beams for up to {num_tokens} tokens may need {num_blocks} KV blocks of "
        f"{limits.block_size} tokens; this engine has {most}. Send fewer beams or a smaller max_tokens, "
        "or raise kvCacheMemory.",
    )


def wider_than_queue(param: str, num_choices: int, max_num_waiting: int) -> PagemillError:
    """Return a 400: the request has more choices than the queue has places, so it could never be queued."""
    return invalid_field(
        param,
        f"This request asks for {num_choices} answers at once; here {max_num_waiting} may wait (max_num_waiting). "
        f"Split it into requests of at most {max_num_waiting}.",
    )


def _queue_full(num_waiting: int, max_num_waiting: int) -> PagemillError:
    return unavailable(
        f"{num_waiting} requests are waiting here and max_num_waiting is {max_num_waiting}. Retry later.",
        retry_after_s=1,
    )
