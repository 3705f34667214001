"""Which answers another engine can continue: the rule shared by engines (what they report) and gateways (what they
keep)."""

from __future__ import annotations

from pagemill_protocol.generate import GenerateRequest

PROGRESS_TOKENS = 16
"""Of one choice of an answer that can be continued and is not streamed: metas tell so many at once, and at most so many
less one are unknown to the gateway while the choice runs."""


def can_be_continued(request: GenerateRequest) -> bool:
    """Whether frame metas suffice to continue at another engine. Otherwise the answer starts again there, before any of
    it was delivered.

    They do not suffice when answers are chosen at their end, nor when log probabilities were not delivered yet.
    """
    sampling = request.sampling
    chooses = sampling.use_beam_search or sampling.num_sequences > sampling.n
    return not chooses and (request.stream or sampling.logprobs is None)
