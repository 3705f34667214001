"""What heads that draft tokens have in common: the hidden states that they read, and the tokens of their vocabulary.

Hidden states are cached like keys and values, behind the head's layer: whatever holds for blocks, holds for them.
`native.head` and `runners.torch_head` compute; `runners.drafter` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagemill_execution.decoders.step_model import LayerCache, TargetModel
from pagemill_kernels import arrays
from pagemill_kernels.arrays import Array
from pagemill_models.spec.model_spec import ModelSpec

_NO_STATES: Array = np.zeros((0, 1, 0), dtype=np.float32)


class HeadStates:
    def __init__(self, spec: ModelSpec, target: TargetModel, token_ids: NDArray[np.int64] | None) -> None:
        """`spec`: the head's. `token_ids`: the tokens of its own vocabulary; None: it uses the target's head."""
        reads = spec.decoder.reads
        assert reads is not None
        self.target, self.token_ids = target, token_ids
        target.keep_before(reads.layers_of(target.spec.num_layers))
        self._states = _NO_STATES

    def keep_in(self, caches: Sequence[LayerCache]) -> Sequence[LayerCache]:
        """Keep hidden states in the last of the caches, and return the others."""
        self._states = _NO_STATES
        for states in caches[-1:]:
            assert isinstance(states, np.ndarray)
            self._states = states[:, 0]
        return caches[:-1]

    def keep_states(self, slots: NDArray[np.int64], last: Array) -> None:
        """Keep what the target has computed of its last step's tokens. `last`: their normalised hidden states."""
        kept = self.target.kept
        self.keep(slots, self.states(np.concatenate([arrays.widened(each) for each in kept], axis=1)) if kept else last)

    def keep(self, slots: NDArray[np.int64], states: Array) -> None:
        """Keep the hidden states that this head reads of some tokens."""
        blocks, offsets = np.divmod(slots, self._states.shape[1])
        values = arrays.widened(states)
        is_short = self._states.dtype == np.uint16
        self._states[blocks, offsets] = arrays.rounded(values) if is_short else values

    def states_of(self, slots: NDArray[np.int64]) -> Array:
        """Return what was kept of tokens."""
        blocks, offsets = np.divmod(slots, self._states.shape[1])
        return arrays.widened(self._states[blocks, offsets])

    def states(self, side_by_side: Array) -> Array:
        """Return one hidden state for those of several layers, [tokens, layers x hidden]."""
        raise NotImplementedError

    def of_target(self, own: Array) -> Array:
        """Return logits of the target's vocabulary from those of the head's own."""
        logits = np.full((len(own), self.target.spec.vocab_size), -np.inf, dtype=np.float32)
        logits[:, self.token_ids] = own
        return logits
