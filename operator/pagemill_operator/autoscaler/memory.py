"""What decisions remember of earlier ones: a value, made anew by each decision, that a record can hold."""

from __future__ import annotations

import msgspec

from pagemill_operator.autoscaler.policy import Policy
from pagemill_operator.autoscaler.signals import Signals
from pagemill_protocol.state import StepTimeParams

LONGEST_GAP_S = 120.0
"""Nothing was decided for longer, or the clock went back: what was remembered tells nothing of the time between."""
LONGEST_WINDOW_S = 3600.0
CALM_WINDOWS = 4.0
"""Down windows without a regret after which one is forgiven."""
MAX_REGRETS = 3
MAX_WISHES = 2048
TREND_S, LONGEST_TREND_S = 30.0, 300.0
"""Between the two rates that a trend is read from: a steep rise shows at once, a gentle one only after a while."""
TREND_STEP_S = 15.0
"""Between two rates that are kept for longer."""


class Shape(msgspec.Struct, frozen=True):
    """What one replica can do; stays true while there is none."""

    num_blocks: int
    block_size: int
    max_num_seqs: int = 0
    """0: not told."""
    max_step_tokens: int = 0
    step_time: StepTimeParams = StepTimeParams()

    @property
    def num_tokens(self) -> int:
        """That its KV cache holds."""
        return self.num_blocks * self.block_size


class Wish(msgspec.Struct, frozen=True, array_like=True):
    at_s: float
    replicas: int


class Change(msgspec.Struct, frozen=True, array_like=True):
    at_s: float
    delta: int


class Rate(msgspec.Struct, frozen=True, array_like=True):
    at_s: float
    requests_per_s: float


class Memory(msgspec.Struct, frozen=True):
    at_s: float = 0.0
    """Of the latest decision."""
    since_s: float | None = None
    """Watched without a gap since then; None: not yet."""
    wishes: tuple[Wish, ...] = ()
    changes: tuple[Change, ...] = ()
    rates: tuple[Rate, ...] = ()
    """Of arrivals over the last minute: all that were told in the past half minute, and some of the past minutes."""
    shape: Shape | None = None
    panic_until_s: float | None = None
    regrets: int = 0
    """Replicas that were removed and needed soon afterwards, lately."""
    regretted_at_s: float | None = None

    def at(self, now: float) -> Memory:
        """As it is worth something at `now`."""
        if self.since_s is not None and 0.0 <= now - self.at_s <= LONGEST_GAP_S:
            return self
        return Memory(at_s=now, since_s=now, shape=self.shape)

    def heard(self, signals: Signals) -> Memory:
        """With the present rate of arrivals, if it is known."""
        arrivals, now = signals.arrivals, signals.at_s
        if arrivals.truth != "value":
            return msgspec.structs.replace(self, rates=())
        kept: list[Rate] = []
        for rate in self.rates:
            age_s = now - rate.at_s
            if age_s <= TREND_S or (age_s <= LONGEST_TREND_S and _is_next(kept, rate)):
                kept.append(rate)
        return msgspec.structs.replace(self, rates=(*kept, Rate(now, arrivals.requests_per_s)))

    def learned(self, signals: Signals) -> Memory:
        """With what a replica is, if the engines tell."""
        engines = signals.engines
        if engines.truth == "unknown" or engines.num_reporting <= 0 or engines.num_blocks_total <= 0:
            return self
        shape = Shape(
            num_blocks=max(1, engines.num_blocks_total // engines.num_reporting),
            block_size=max(1, engines.block_size),
            max_num_seqs=max(0, engines.max_num_seqs),
            max_step_tokens=max(0, engines.max_step_tokens),
            step_time=engines.step_time,
        )
        return msgspec.structs.replace(self, shape=shape)

    def wished(self, now: float, replicas: int, keep_s: float) -> Memory:
        kept = [wish for wish in self.wishes if now - wish.at_s <= keep_s]
        # A wish that is repeated lives on; the time of its latest repeat is what windows go by.
        if len(kept) > 1 and kept[-1].replicas == kept[-2].replicas == replicas:
            kept.pop()
        kept.append(Wish(now, replicas))
        return msgspec.structs.replace(self, at_s=now, wishes=tuple(kept[-MAX_WISHES:]))

    def down_window_s(self, policy: Policy) -> float:
        """Doubled by each regret, unless the resource sets it."""
        if policy.down.is_own_window:
            return policy.down.window_s
        return min(LONGEST_WINDOW_S, policy.down.window_s * 2.0**self.regrets)

    def changed(self, now: float, delta: int, policy: Policy) -> Memory:
        """Replicas were added or removed."""
        regrets, regretted_at_s = self.regrets, self.regretted_at_s
        window_s = self.down_window_s(policy)
        latest_down = max((change.at_s for change in self.changes if change.delta < 0), default=None)
        if delta > 0 and latest_down is not None and now - latest_down <= 2 * window_s:
            regrets, regretted_at_s = min(MAX_REGRETS, regrets + 1), now
        kept = [change for change in self.changes if now - change.at_s <= 2 * LONGEST_WINDOW_S]
        return msgspec.structs.replace(
            self, changes=(*kept, Change(now, delta)), regrets=regrets, regretted_at_s=regretted_at_s
        )

    def forgiven(self, now: float, policy: Policy) -> Memory:
        """After a long calm a regret counts no more."""
        if not self.regrets or self.regretted_at_s is None:
            return self
        if now - self.regretted_at_s < CALM_WINDOWS * self.down_window_s(policy):
            return self
        return msgspec.structs.replace(self, regrets=self.regrets - 1, regretted_at_s=now)


def _is_next(kept: list[Rate], rate: Rate) -> bool:
    return not kept or rate.at_s - kept[-1].at_s >= TREND_STEP_S
