"""Parse a tokenizer's JSON for `tokenizer_rules` and its other readers of ours.

The merges of a BPE model, half of the file, are left out: only the library reads them, and tens of thousands of lists
take as long to make as all the rest.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from pagemill_protocol.source_errors import UnreadableModelError

MAX_CHARS = 64 * 1024 * 1024
_parts = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse(tokenizer_json: str) -> Any:
    """Return the values of a tokenizer's JSON, with an empty list of merges.

    Raises `UnreadableModelError` or `ValueError`.
    """
    if len(tokenizer_json) > MAX_CHARS:
        raise UnreadableModelError(
            f"the model's tokenizer cannot be used: its file has {len(tokenizer_json)} characters, more than "
            f"{MAX_CHARS}. Use a smaller vocabulary."
        )
    parts = _parts.decode(tokenizer_json)
    return {name: _without_merges(raw) if name == "model" else _value(raw) for name, raw in parts.items()}


def _without_merges(model: msgspec.Raw) -> Any:
    try:
        parts = _parts.decode(model)
    except msgspec.ValidationError:  # it is no object, which `tokenizer_rules` refuses by name
        return _value(model)
    return {name: [] if name == "merges" else _value(raw) for name, raw in parts.items()}


def _value(raw: msgspec.Raw) -> Any:
    return orjson.loads(memoryview(raw))
