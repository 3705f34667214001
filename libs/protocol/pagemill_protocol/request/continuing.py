"""The rule for which answers another engine can continue, shared by engines (what they report) and gateways (what they
keep)."""

from __future__ import annotations

from pagemill_protocol.request.generate import ChoiceResume, GenerateRequest

PROGRESS_TOKENS = 16
"""Tokens per progress report of a choice that can be continued and is not streamed. At most one less is unknown to the
gateway while the choice runs."""


def can_be_continued(request: GenerateRequest) -> bool:
    """Whether frame metas suffice to continue the answer at another engine.

    If not, the answer starts again there, before any of it was delivered. They do not suffice when choices are selected
    at their end, nor when log probabilities were not delivered yet, or have to be repeated at the end.
    """
    sampling = request.sampling
    chooses = sampling.use_beam_search or sampling.num_sequences > sampling.n
    return not chooses and (sampling.num_alternatives is None or (request.stream and not request.keeps_logprobs))


def has_begun(resume: ChoiceResume, request: GenerateRequest) -> bool:
    """Whether the first chunk of a choice of a streamed answer was delivered."""
    shows_tokens = request.sampling.num_alternatives is not None or request.return_token_ids
    return bool(resume.num_text_chars or resume.finished) or (shows_tokens and bool(resume.token_ids))


def needs_prompt_logprobs(request: GenerateRequest) -> bool:
    """Whether the rest of the answer reports log probabilities of the prompt.

    A streamed answer reports them in the first chunk of each choice; chunks that were delivered are not repeated.
    """
    if request.num_prompt_logprobs is None:
        return False
    num_begun = sum(has_begun(resume, request) for resume in request.resume) if request.stream else 0
    return num_begun < request.sampling.num_reported
