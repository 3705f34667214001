"""Which answers another engine can continue: the rule that engine (what it tells) and gateway (what it keeps) share."""

from __future__ import annotations

from pagemill_protocol.generate import GenerateRequest

PROGRESS_TOKENS = 16
"""Of one choice of an answer that can be continued and is not streamed: metas tell so many at once, and at most so many
less one are unknown to the gateway while the choice runs."""


def can_be_continued(request: GenerateRequest) -> bool:
    """Whether metas tell enough to go on at another engine; else it must begin anew there, of which nobody saw a part.

    They do not when answers are chosen at their end, nor when nobody has seen the log probabilities so far.
    """
    sampling = request.sampling
    chooses = sampling.use_beam_search or sampling.num_sequences > sampling.n
    return not chooses and (request.stream or sampling.logprobs is None)
