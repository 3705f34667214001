"""Which answers another engine can continue: the rule that engine (what it tells) and gateway (what it keeps) share."""

from __future__ import annotations

from pagemill_protocol.generate import GenerateRequest


def can_be_continued(request: GenerateRequest) -> bool:
    """Whether metas tell enough to go on at another engine; else it must begin anew there, of which nobody saw a part.

    They do not when answers are chosen at their end, nor when nobody has seen the log probabilities so far.
    """
    sampling = request.sampling
    chooses = sampling.use_beam_search or sampling.num_sequences > sampling.n
    return not chooses and (request.stream or sampling.logprobs is None)
