"""Three scores with weights 2, 2 and 3: the default profile of llm-d's endpoint picker, for comparison.

Queue: the position of an endpoint's waiting requests between the fewest (1) and the most (0) among the candidates. KV:
the share of the cache that is not in use. Prefix: the share of the prompt that is cached. The largest sum wins, and
ties are drawn at random. All inputs come from reports; requests sent since do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagemill_routing.policies.policy import Candidate, RequestView, RoutingDecision, RoutingPolicy

QUEUE_WEIGHT, KV_WEIGHT, PREFIX_WEIGHT = 2.0, 2.0, 3.0


class Weighted322(RoutingPolicy):
    name = "Weighted322"

    def choose(self, request: RequestView, candidates: Sequence[Candidate]) -> RoutingDecision:
        queues = queue_scores([_num_waiting(each) for each in candidates])
        rows = []
        for candidate, queue in zip(candidates, queues, strict=True):
            kv, prefix = 1 - _kv_usage(candidate), _hit_share(candidate, request)
            rows.append((queue, kv, prefix, QUEUE_WEIGHT * queue + KV_WEIGHT * kv + PREFIX_WEIGHT * prefix))
        best = max(row[-1] for row in rows)
        tied = [each for each, row in zip(candidates, rows, strict=True) if row[-1] == best]
        chosen = tied[int(request.draw * len(tied))]
        return RoutingDecision(
            chosen, "largest weighted score", ("queue", "kv", "prefix", "score"), rows, largest_wins=True
        )


def queue_scores(waiting: Sequence[int]) -> list[float]:
    """Return 1 for the shortest queue, 0 for the longest, and values in proportion between; all 1 if they are equal."""
    least, most = min(waiting), max(waiting)
    if least == most:
        return [1.0] * len(waiting)
    return [(most - each) / (most - least) for each in waiting]


def _num_waiting(candidate: Candidate) -> int:
    return candidate.report.load.num_requests_waiting if candidate.report is not None else 0


def _kv_usage(candidate: Candidate) -> float:
    return candidate.report.load.kv_cache_usage if candidate.report is not None else 0.0


def _hit_share(candidate: Candidate, request: RequestView) -> float:
    return candidate.num_cached_tokens / request.num_prompt_tokens if request.num_prompt_tokens else 0.0
