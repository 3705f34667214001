"""Token masks of sequences: combines form, `allowed_token_ids` and `bad_words` into one mask.

The grammar of a form is `pagemill_engine.grammar`'s part; the runner applies masks to logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, cast

from pagemill_engine.scheduler.finish import finish_reason
from pagemill_engine.scheduler.restriction import without
from pagemill_engine.scheduler.sequence import Sequence
from pagemill_protocol.errors import invalid_field

if TYPE_CHECKING:
    from pagemill_engine.scheduler.restriction import Mask


def begin(sequence: Sequence) -> None:
    """Set the mask of a new sequence's next token. Raises `PagemillError` if no token may follow."""
    restriction, grammar = sequence.restriction, sequence.grammar
    if restriction is None and grammar is None:
        return
    sequence.needs_last_token = grammar is not None or (restriction is not None and restriction.depends_on_output)
    if (fault := _find_mask(sequence)) and not sequence.num_resumed_tokens:
        field = "allowed_token_ids" if sequence.sampling.allowed_token_ids is not None else "bad_words"
        raise invalid_field(field, f"The answer cannot begin: {fault}. Remove one of them.")


def advance(sequence: Sequence) -> str:
    """Set the mask after the sequence's newest token.

    Returns why the sequence cannot continue; "" if it can or has ended.
    """
    token_id = sequence.token_ids[-1]
    if token_id in sequence.stop_ids:
        return ""
    if sequence.grammar is not None and (fault := sequence.grammar.advance(token_id)):
        return fault
    if sequence.grammar is not None and sequence.grammar.is_free:
        sequence.grammar = None
        sequence.needs_last_token = sequence.restriction is not None and sequence.restriction.depends_on_output
    return _find_mask(sequence)


def masks_along(sequence: Sequence, proposed: list[int]) -> tuple[list[int], list[Mask | None] | None]:
    """Return the proposed tokens that fit, up to one that ends the sequence, and the mask of each token that may be
    sampled: one more than tokens. No list: any tokens may be."""
    if sequence.restriction is None and sequence.grammar is None:
        end = next((place for place, token_id in enumerate(proposed) if token_id in sequence.stop_ids), len(proposed))
        return proposed[: end + 1], None
    if not proposed:
        return [], None
    grammar = None if sequence.grammar is None else sequence.grammar.copy()
    walk = replace(sequence, token_ids=list(sequence.token_ids), grammar=grammar)
    masks = [_current_mask(sequence)]
    fitting: list[int] = []
    for token_id in proposed:
        if not _allows(masks[-1], token_id) or token_id in walk.stop_ids:
            break
        walk.token_ids.append(token_id)
        if advance(walk) or finish_reason(walk) is not None:
            break
        fitting.append(token_id)
        masks.append(_current_mask(walk))
    return fitting, masks


def _current_mask(sequence: Sequence) -> Mask | None:
    """Return a copy of the mask of the sequence's next token."""
    grammar, given = sequence.grammar, sequence.token_mask
    mask = grammar.mask if grammar is not None and given is grammar else cast("Mask | None", given)
    return None if mask is None else mask.copy()


def _allows(mask: Mask | None, token_id: int) -> bool:
    return mask is None or bool(int(mask[token_id // 32]) >> token_id % 32 & 1)


def take_forced(sequence: Sequence, most: int) -> str:
    """Append at most so many tokens that the form leaves no choice about: steps would sample the same ones.

    Returns why the sequence cannot continue, like `advance`. Source: jump-forward decoding, SGLang (arXiv 2312.07104);
    here it works on whole tokens, so that the text's tokens stay the same.
    """
    end = len(sequence.token_ids) + most
    while finish_reason(sequence) is None and (forced := _forced(sequence)[: end - len(sequence.token_ids)]):
        for token_id in forced:
            sequence.token_ids.append(token_id)
            fault = advance(sequence)
            if fault or finish_reason(sequence) is not None:
                return fault
    return ""


def _forced(sequence: Sequence) -> list[int]:
    """Return the forced tokens before the request's own stop tokens, which count only after `min_tokens` others."""
    if sequence.grammar is None or sequence.restriction is not None:
        return []
    return list(takewhile(lambda token_id: token_id not in sequence.stop_ids, sequence.grammar.forced))


def _find_mask(sequence: Sequence) -> str:
    restriction, grammar = sequence.restriction, sequence.grammar
    if restriction is None:
        sequence.token_mask = grammar
        return ""
    first = max(sequence.num_prompt_tokens, len(sequence.token_ids) - restriction.num_read)
    mask = restriction.mask(sequence.token_ids[first:])
    prescribed = None if grammar is None else grammar.mask
    sequence.token_mask = mask = mask if prescribed is None else mask & prescribed
    too_early = sequence.stop_ids if sequence.num_output_tokens < sequence.sampling.min_tokens else ()
    if without(mask, too_early).any() or (sequence.num_output_tokens and finish_reason(sequence) is not None):
        return ""
    return "its bad_words, allowed_token_ids, min_tokens and form together leave no token that may follow"


def begin_masks(sequences: Iterable[Sequence]) -> None:
    """Start computing, in a thread, the masks that a step's sampling needs. One mask alone is faster without a
    thread."""
    states = (sequence.grammar for sequence in sequences)
    due = [found for state in states if state is not None and (found := state.due) is not None]
    if len(due) > 1:
        # Imports llguidance, which only requests with a form need.
        from pagemill_engine.grammar import state as grammar_states

        grammar_states.begin_masks(due)
