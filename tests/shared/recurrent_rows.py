"""Three scripted recurrent layers as a device has them: states in slots, and for each row a log of the tokens since.

A delta rule, a decayed sum of outer products as in Mamba 2, and a short convolution. Each output is computed from a
row's state and log, and compared with the same recurrence taken token by token over the row's whole prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

SIZE = 3
WIDTH = 4
TOLERANCE = 1e-9
States = tuple[Any, Any, Any]
EMPTY: States = (np.zeros((SIZE, SIZE)), np.zeros((SIZE, SIZE)), np.zeros((WIDTH - 1, SIZE)))


class RecurrentFault(RuntimeError):
    """A row's output differs from that of its own prefix, or states are used out of turn."""


def inputs_of(token_id: int) -> dict[str, Any]:
    draw = np.random.default_rng(token_id + 7)
    key = draw.normal(size=SIZE)
    return {
        "key": key / np.linalg.norm(key),
        "value": draw.normal(size=SIZE),
        "query": draw.normal(size=SIZE),
        "rate": draw.uniform(0.2, 0.9),
        "decay": draw.uniform(0.7, 0.99),
        "step": draw.uniform(0.05, 0.6),
    }


KERNEL = np.random.default_rng(3).normal(size=(WIDTH, SIZE))


def one_by_one(states: States, token_id: int) -> tuple[States, Any]:
    """Return the states behind a further token, and its output: the plain recurrence."""
    token = inputs_of(token_id)
    delta = token["decay"] * states[0]
    delta = delta + token["rate"] * np.outer(token["key"], token["value"] - token["key"] @ delta)
    decayed = np.exp(-token["step"]) * states[1] + token["step"] * np.outer(token["key"], token["value"])
    window = np.concatenate([states[2], token["value"][None]])
    output = np.concatenate([token["query"] @ delta, token["query"] @ decayed, (KERNEL * window).sum(0)])
    return (delta, decayed, window[1:]), output


class RecurrentRows:
    """The states and logs of a device's rows. `token_ids` of a row are all that it has, proposed ones included."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, States | None] = {}
        """None: written by a row that failed."""
        self.rows: dict[str, dict[str, Any]] = {}
        self.num_checked = 0
        self.num_states_kept = 0
        self._embedded: dict[int, dict[str, Any]] = {}

    def admit(self, name: str, num_computed: int, first: int, slots: list[int]) -> None:
        boundary = num_computed // self.block_size
        if num_computed % self.block_size:
            raise RecurrentFault(f"{name} resumes inside a block, where it has no state")
        slot = slots[boundary - 1 - first] if boundary else -1
        if boundary and slot < 0:
            raise RecurrentFault(f"{name} resumes behind {boundary} blocks without a state")
        writes = [(index, slot) for index, slot in enumerate(slots, first) if index >= boundary and slot >= 0]
        self.rows[name] = {"boundary": boundary, "slot": slot, "log": [], "writes": writes}

    def place(self, name: str, index: int, slot: int) -> None:
        """Note a state that the row writes, or where the one that it reads was moved."""
        row = self.rows[name]
        if index >= row["boundary"]:
            row["writes"].append((index, slot))
        elif index == row["boundary"] - 1:
            row["slot"] = slot

    def run(
        self,
        steps: dict[str, tuple[list[int], int, int, int]],
        failing: set[str],
        write: Callable[[int, States | None], None],
    ) -> set[str]:
        """Compute a step of all rows; return those that read what a failed row wrote. `write`: stores a state.

        `steps`: by row its token ids, how many are computed, how many the step computes, and how many of these are only
        proposed.
        """
        written: dict[int, str] = {}
        for name in steps:
            for _, slot in self.rows[name]["writes"]:
                if slot in written:
                    raise RecurrentFault(f"{name} and {written[slot]} both write state {slot}")
                written[slot] = name
        results: dict[int, States | None] = {}
        spoiled = set()
        for name, (token_ids, num_computed, count, num_proposed) in steps.items():
            row = self.rows[name]
            if written.get(row["slot"], name) != name:
                raise RecurrentFault(f"{name} reads a state that {written[row['slot']]} writes in the same step")
            start = row["boundary"] * self.block_size
            if start + len(row["log"]) != num_computed:
                raise RecurrentFault(f"{name} has a log of {len(row['log'])} tokens since {start}, not {num_computed}")
            before = self.slots[row["slot"]] if row["boundary"] else EMPTY
            if before is None:
                spoiled.add(name)
            for position in range(num_computed, num_computed + count):
                self._compute(name, before, row["log"], token_ids[: position + 1])
            known = num_computed + count - num_proposed
            for index, slot in row["writes"]:
                num_tokens = (index + 1) * self.block_size
                if not start < num_tokens <= known:
                    raise RecurrentFault(f"{name} is to write the state of {num_tokens} of {known} tokens")
                sound = before is not None and name not in failing
                results[slot] = _folded(before, row["log"][: num_tokens - start]) if sound and before else None
            if row["writes"]:
                self.num_states_kept += len(row["writes"])
                last, row["slot"] = row["writes"][-1]
                del row["log"][: (last + 1 - row["boundary"]) * self.block_size]
                row["boundary"], row["writes"] = last + 1, []
            if row["boundary"] != known // self.block_size:
                raise RecurrentFault(f"{name} has its state behind {row['boundary']} blocks and {known} tokens")
        for slot, states in results.items():
            write(slot, states)
        return spoiled

    def withdraw(self, name: str, num_tokens: int) -> None:
        log = self.rows[name]["log"]
        del log[len(log) - num_tokens :]

    def _compute(self, name: str, before: States | None, log: list[dict[str, Any]], prefix: list[int]) -> None:
        """Append a token to a row's log, and compare its output with that of its prefix."""
        token = self._embedded.setdefault(prefix[-1], inputs_of(prefix[-1]))
        if before is None:
            log.append(token)
            return
        delta = token["decay"] * _delta(before[0], log)
        corrected = token["rate"] * (token["value"] - token["key"] @ delta)
        log.append({**token, "corrected": corrected})
        window = _window(before[2], log)
        found = np.concatenate(
            [
                token["query"] @ _delta(before[0], log),
                token["query"] @ _decayed(before[1], log),
                (KERNEL * np.concatenate([window[: WIDTH - 1], token["value"][None]])[-WIDTH:]).sum(0),
            ]
        )
        self.num_checked += 1
        if np.abs(found - _plain(tuple(prefix))[1]).max() > TOLERANCE:
            raise RecurrentFault(f"{name} has another output at {len(prefix) - 1} than its prefix has")


_PLAIN: dict[tuple[int, ...], tuple[States, Any]] = {(): (EMPTY, None)}


def _plain(prefix: tuple[int, ...]) -> tuple[States, Any]:
    """Return the states behind a prefix and the output of its last token, taken token by token."""
    num_known = len(prefix)
    while prefix[:num_known] not in _PLAIN:
        num_known -= 1
    for end in range(num_known, len(prefix)):
        _PLAIN[prefix[: end + 1]] = one_by_one(_PLAIN[prefix[:end]][0], prefix[end])
    return _PLAIN[prefix]


def _delta(state: Any, log: list[dict[str, Any]]) -> Any:
    decay = 1.0
    total = np.zeros((SIZE, SIZE))
    for token in reversed(log):
        total = total + decay * np.outer(token["key"], token["corrected"])
        decay *= token["decay"]
    return decay * state + total


def _decayed(state: Any, log: list[dict[str, Any]]) -> Any:
    decay = 1.0
    total = np.zeros((SIZE, SIZE))
    for token in reversed(log):
        total = total + decay * token["step"] * np.outer(token["key"], token["value"])
        decay *= np.exp(-token["step"])
    return decay * state + total


def _window(state: Any, log: list[dict[str, Any]]) -> Any:
    """Return the inputs of the convolution before the log's last token."""
    values = [token["value"] for token in log[:-1]]
    return np.concatenate([state, *(value[None] for value in values)])[1 - WIDTH :]


def _folded(states: States, log: list[dict[str, Any]]) -> States:
    values = np.concatenate([states[2], *(token["value"][None] for token in log)])
    return _delta(states[0], log), _decayed(states[1], log), values[1 - WIDTH :]
