"""SentencePiece BPE (Kudo and Richardson, arXiv 1808.06226) expressed in the `tokenizers` format.

A SentencePiece model has scores, not merges: at each step the adjacent pair whose joined piece has the best score is
merged. A list of merges sorted by the scores of their results gives the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SPACE = "▁"


def merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all ways to make each piece from two others, best score first; equal scores in vocabulary order."""
    ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        ids.setdefault(token, token_id)
    ranked: list[tuple[float, int, str, str]] = []
    for piece, token_id in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], token_id, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, left, right in ranked]


def model_json(ids: Mapping[str, int], pairs: Sequence[tuple[str, str]], unk_token: str | None) -> dict[str, Any]:
    """Return the BPE model; unknown characters become `<0xXX>` byte tokens where the vocabulary has them."""
    return {
        "type": "BPE",
        "unk_token": unk_token,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": ids,
        "merges": pairs,
    }


def normalizer_json(*, add_space_prefix: bool) -> dict[str, Any]:
    """Return a normalizer that replaces spaces by `SPACE` and may prefix every run of text, also after special
    tokens."""
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    if add_space_prefix:
        steps.insert(0, {"type": "Prepend", "prepend": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def decoder_json(*, add_space_prefix: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if add_space_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}
