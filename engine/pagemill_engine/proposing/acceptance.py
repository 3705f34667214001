"""How likely a proposed token is the one that is sampled, learned from what followed.

A proposal is taken from a text that agrees with the sequence's last tokens. The longer the agreement, the likelier the
next token agrees too, and each token that does makes the agreement longer by one: the chance of the token at place j of
a proposal is that of an agreement of a + j tokens. So places learn from each other, a copy is recognised within a few
tokens, and the first words behind a coincidence cost little. What a model drafts agrees with no text: its first tokens
have agreements of 0 to 3 and so a class for each place. A sequence has counts of its own over those of its engine,
which have a measured prior. Proposals that were not verified teach as well: what followed is known a step later. `gain`
decides by these chances.
"""

from __future__ import annotations

from bisect import bisect_right

EDGES = (1, 2, 3, 4, 6, 9, 13, 20, 32)
"""Tokens of agreement where classes begin. Texts agree in 3 at least."""
PRIOR = (0.50, 0.50, 0.50, 0.50, 0.62, 0.72, 0.82, 0.88, 0.93, 0.96)
"""Least chances by class before anything is known: it is also as likely as the token before it."""
PRIOR_TRIES = 4.0
"""Tokens that the chances of what is above count for."""
ENGINE_TRIES, OWN_TRIES = 512.0, 24.0
"""Tokens of a class after which older ones count half, of an engine and of a sequence."""


class Acceptance:
    """Counts by class of agreement."""

    __slots__ = ("_above", "_hits", "_most", "_tries")

    def __init__(self, above: Acceptance | None = None) -> None:
        """`above`: the engine's counts, for those of a sequence."""
        self._above = above
        self._most = ENGINE_TRIES if above is None else OWN_TRIES
        self._hits = [0.0] * len(PRIOR)
        self._tries = [0.0] * len(PRIOR)

    def chance(self, place: int, before: float = 0.0) -> float:
        """Return the chance of a token of class `place`. `before`: that of the token before it in its proposal."""
        above = max(PRIOR[place], before) if self._above is None else self._above.chance(place, before)
        return (self._hits[place] + PRIOR_TRIES * above) / (self._tries[place] + PRIOR_TRIES)

    def along(self, agreement: int, num_tokens: int) -> list[float]:
        """Return for each token of a proposal the chance that it and all before it are sampled."""
        chances, chance, known, last = [], 1.0, 0.0, -1
        for length in range(agreement, agreement + num_tokens):
            place = bisect_right(EDGES, length)
            if place != last:
                known, last = self.chance(place, known), place
            chance *= known
            chances.append(chance)
        return chances

    def learn(self, agreement: int, num_right: int, num_known: int) -> None:
        """Record that of a proposal's first `num_known` tokens the first `num_right` followed, and the next did not."""
        for index in range(min(num_right + 1, num_known)):
            place = bisect_right(EDGES, agreement + index)
            if self._tries[place] >= self._most:
                self._tries[place] /= 2
                self._hits[place] /= 2
            self._tries[place] += 1
            self._hits[place] += index < num_right
        if self._above is not None:
            self._above.learn(agreement, num_right, num_known)
