"""What the ranks of a model send to each other in a step, and how long that takes by the data sheets of their links.

`replica` adds it to the step times of a data sheet, `report` shows it. Logits are not counted: between devices only
candidates travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagemill.planning.accelerators import DEVICES_PER_NODE, Accelerator, Link
from pagemill_execution.sizing.budget import RankSizes
from pagemill_models.declaration.declaration import DecoderSpec

LINK_SHARE = 0.7
"""Share of a link's speed that is reached, as of the memory's."""
COLLECTIVE_MS = 0.01
"""Fixed time of each exchange: its launch, and the wait of all ranks for the last one."""


class Exchange(NamedTuple):
    link: Link
    """Between the ranks of a stage."""
    between: Link
    """Between stages."""
    ranks: int
    """Of a stage."""
    stages: int
    sums: int
    """Sums over the ranks of a stage in a step, of the stage that has most."""
    bytes_per_token: int
    """Of one sum, and of what a stage gives to the next one."""

    def sent_bytes(self, num_tokens: int) -> int:
        """Return what each rank of the busiest stage sends in a step of so many tokens.

        Of a sum each rank sends its parts to the others and its part of the result to all.
        """
        summed = self.sums * 2 * (self.ranks - 1) * self.bytes_per_token // self.ranks
        return num_tokens * (summed + (self.bytes_per_token if self.stages > 1 else 0))

    def ms(self, num_tokens: int) -> float:
        """Return the time of a stage's exchanges in a step of so many tokens."""
        found = 0.0
        if self.ranks > 1:
            sent = 2 * (self.ranks - 1) / self.ranks * self.bytes_per_token * num_tokens
            found += self.sums * (COLLECTIVE_MS + sent / _bytes_per_ms(self.link))
        if self.stages > 1:
            found += COLLECTIVE_MS + self.bytes_per_token * num_tokens / _bytes_per_ms(self.between)
        return found


def exchange_of(accelerator: Accelerator, ranks: Sequence[RankSizes], ranks_of_stage: int) -> Exchange:
    """Return what the ranks of a model send. Stages of one node use its links, those of several the network."""
    first = ranks[0]
    return Exchange(
        link=accelerator.link,
        between=accelerator.link if len(ranks) <= DEVICES_PER_NODE else accelerator.network,
        ranks=ranks_of_stage,
        stages=len(ranks) // ranks_of_stage,
        sums=max(num_sums(each.spec.decoder) for each in ranks) if ranks_of_stage > 1 else 0,
        bytes_per_token=first.spec.hidden_size * first.sizes.item_bytes,
    )


def num_sums(decoder: DecoderSpec) -> int:
    """Return the sums over ranks in a step: of each block, of blocks side by side one, and of the embedding."""
    cuts = sum(
        1 if all(branch.output_norm is None for branch in residual.branches) else len(residual.branches)
        for layer in decoder.layers
        for residual in layer.residuals
    )
    return cuts + decoder.embeds


def _bytes_per_ms(link: Link) -> float:
    return link.bytes_per_s * LINK_SHARE / 1000
