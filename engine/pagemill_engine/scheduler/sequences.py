"""The sequences of all requests: where each one is, and how it moves between queue, batch, forks and end.

`scheduler` decides which sequences run, `recovery` what happens after a failed step, and `beam_searches` how a search
goes on. All of them move sequences by these methods, so that queues, counts and block tables agree with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.scheduler.choices import WaitingChoices
from pagemill_engine.scheduler.in_flight_steps import InFlightSteps
from pagemill_engine.scheduler.order.sorted_sequences import SortedSequences, serving_key
from pagemill_engine.scheduler.reporting.outputs import OutputQueue
from pagemill_engine.scheduler.sequence import Sequence, SequenceState
from pagemill_protocol.request.generate import FinishReason


class Sequences:
    """Iterates over the ids of the sequences that have not ended."""

    def __init__(
        self, kv: CacheManager, rank: Callable[[Sequence], Any], ended: Callable[[Sequence], None] | None = None
    ) -> None:
        """`rank`: the sort key of the waiting sequences. `ended`: is called with each sequence that has ended."""
        self.kv = kv
        self._ended = ended
        self.outputs = OutputQueue()
        self.in_flight = InFlightSteps()
        self.waiting = SortedSequences(rank)
        self.running = SortedSequences(serving_key)
        self.choices = WaitingChoices()
        self.by_id: dict[str, Sequence] = {}
        self.by_client: dict[str, dict[int, Sequence]] = {}
        """Client request -> choice -> sequence."""
        self.reporting: dict[str, Sequence] = {}
        """Sequences of requests that report log probabilities of their prompts."""
        self.probing: list[Sequence] = []
        """Sequences of a step that failed as a whole. Each runs alone until it is cleared or blamed."""
        self.forks: dict[str, Sequence] = {}
        """Sequences that own blocks but are in no batch: forks that wait to start, beams that wait for each other."""
        self.num_queued_tokens = 0
        """Tokens that waiting sequences have yet to compute."""
        self.num_preemptions = 0
        self._released: list[str] = []

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_id)

    def add(self, sequence: Sequence) -> None:
        """Register a sequence, which is in no queue yet."""
        self.by_id[sequence.request_id] = sequence
        self.by_client.setdefault(sequence.client_request_id, {})[sequence.choice] = sequence
        if sequence.prompt_report is not None:
            self.reporting[sequence.request_id] = sequence

    def queue(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        self.waiting.add(sequence)
        self.num_queued_tokens += sequence.num_due_tokens

    def unqueue(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue. Call this before its block table changes."""
        self.waiting.remove(sequence)
        self.forks.pop(sequence.request_id, None)
        self.num_queued_tokens -= sequence.num_due_tokens

    def leave_batch(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._released.append(sequence.request_id)

    def preempt(self, sequence: Sequence) -> None:
        """Return the sequence to the queue with nothing computed. Its generated tokens are kept as known tokens. The
        token that a step in flight samples for it is kept too: that step still uses the blocks."""
        self.kv.free(sequence)
        self.leave_batch(sequence)
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self.queue(sequence)

    def preempt_low_priority(self, most: int) -> None:
        """Preempt low-priority sequences for waiting ones of higher priority if the batch has `most` sequences. Their
        computed tokens stay in the prefix cache as long as there is space. They start again after all others."""
        if len(self.running) < most or not self.running.last_except(None).is_low_priority:
            return
        num_higher = sum(1 for sequence in islice(self.waiting, most) if not sequence.is_low_priority)
        for _ in range(num_higher):
            if not (self.running and (last := self.running.last_except(None)).is_low_priority):
                return
            self.preempt(last)

    def swap_released(self, following: list[str]) -> list[str]:
        """Return the sequences that the runner must release with the next plan, and set those of the plan after it."""
        released, self._released = self._released, following
        return released

    def release_again(self, names: list[str]) -> None:
        """Have the next plan release these too: the plans that should have done it failed."""
        self._released = [*names, *self._released]

    # -- forks ---------------------------------------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let `child`, which is in no batch, share the blocks of the parent's first `num_tokens` tokens, as far as the
        parent still has them."""
        if self.kv.fork(parent, child, num_tokens):
            self.forks[child.request_id] = child

    def fork_choices(self, leader: Sequence) -> None:
        """Queue the choices that can share the leader's prompt now."""
        for child in self.choices.forkable(leader):
            self.fork(leader, child, leader.num_prompt_tokens - 1)
            self.queue(child)

    def last_fork(self) -> Sequence | None:
        """Return the sequence in `forks` that loses its blocks first, or None."""
        return max(self.forks.values(), key=serving_key, default=None)

    def drop_fork(self, sequence: Sequence) -> None:
        """Free the blocks of a fork, which will compute its tokens itself."""
        del self.forks[sequence.request_id]
        self.num_queued_tokens += sequence.num_computed_tokens if sequence.state is SequenceState.WAITING else 0
        self.kv.free(sequence)

    # -- ends ----------------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.outputs.end(sequence, reason)
        self.free(sequence)

    def fail(self, sequence: Sequence, message: str) -> None:
        self.outputs.failure(sequence, message)
        self.free(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Drop everything that steps in flight compute for the sequence."""
        self.in_flight.discard(sequence)
        self.withdraw_pending(sequence, sequence.num_pending_tokens)

    def withdraw_pending(self, sequence: Sequence, num_tokens: int) -> None:
        """Drop pending tokens that the sequence did not sample."""
        if sequence.state is SequenceState.WAITING:
            self.num_queued_tokens -= num_tokens
        sequence.num_pending_tokens -= num_tokens

    def clear(self, sequence: Sequence) -> None:
        """Record that a step computed the sequence: if it is probed, it was not the cause of the failure."""
        if sequence in self.probing:
            self.probing.remove(sequence)

    def free(self, sequence: Sequence) -> None:
        """Release everything that the sequence owns. Every sequence ends here, and a search whose end was reported
        with its first sequence."""
        if sequence.state is SequenceState.FINISHED:  # ended with another beam of its search
            return
        self._leave(sequence)
        if self._ended is not None:
            self._ended(sequence)
        if self.kv.has_table(sequence):
            self.kv.free(sequence)
        sequence.state = SequenceState.FINISHED
        self.discard(sequence)
        self.clear(sequence)
        del self.by_id[sequence.request_id]
        self.reporting.pop(sequence.request_id, None)
        mine = self.by_client[sequence.client_request_id]
        del mine[sequence.choice]
        if not mine:
            del self.by_client[sequence.client_request_id]
        if sequence.search is not None and sequence.search.end_reported:
            others, sequence.search.beams = sequence.search.sequences, []
            for other in others:
                self.free(other)
        successor = self.choices.successor(sequence)
        if successor is not None:
            self.queue(successor)

    def _leave(self, sequence: Sequence) -> None:
        """Remove the sequence from where it is."""
        if sequence.state is SequenceState.RUNNING:
            self.leave_batch(sequence)
        elif sequence.state is SequenceState.WAITING_FOR_FORK:
            self.choices.drop(sequence)
        elif sequence in self.waiting:
            self.unqueue(sequence)
        self.forks.pop(sequence.request_id, None)
