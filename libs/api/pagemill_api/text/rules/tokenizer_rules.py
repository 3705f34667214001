"""Decide from a tokenizer's JSON whether every text costs it bounded time and memory, before a library reads it.

A gateway tokenizes for all models in one process, and a model's publisher writes the file. A step is known if it is one
of the tables below, with bounded lengths; regular expressions must be linear (`linear_regex`). The bounds of a text
itself are in `fitting`, which takes the growth that is returned here into account. A tokenizer with any other step is
used in a limited process (`encoding.limited_encoder`). What the server reads itself, which is the vocabulary, the added
tokens and the decoder, is refused by name where it has no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pagemill_api.text.rules.charsmap import DamagedCharsmap, growth_of
from pagemill_api.text.rules.linear_regex import NotLinear, least_chars
from pagemill_protocol.source_errors import UnreadableModelError

MAX_GROWTH = 20.0
"""Maximum factor by which normalization may lengthen a text: BERT's may by 9, SentencePiece's NFKC by 11."""
MAX_DECODED_GROWTH = 4.0
MAX_STEPS = 32
MAX_DEPTH = 8
MAX_ENTRIES = 1024 * 1024
MAX_ENTRY_CHARS = 2048
MAX_UNIGRAM_CHARS = 128
"""Unigram models look for pieces of up to this length from each place of a text; trainers make 16 characters."""
MAX_ADDED_TOKENS = 64 * 1024
MAX_ADDED_CHARS = 256 * 1024
MAX_WORD_CHARS = 256
"""WordPiece takes time in proportion to the square of a word's length."""
MAX_AFFIX_CHARS = 16
MAX_TEMPLATE_PIECES = 64
_MAX_ID = 2**31
_SHOWN = 80

_Step = Mapping[str, Any]
NFC_GROWTH = 3.0
_UNICODE_FORMS = {"NFC": NFC_GROWTH, "NFD": NFC_GROWTH, "NFKC": 11.0, "NFKD": 11.0, "Nmt": 1.0}
"""Most bytes of UTF-8 per byte, from Unicode's annex 15 (U+FDFA becomes 18 characters)."""
_LOWERCASE = 1.5
_BERT = 2.0 * 3.0 * _LOWERCASE
"""Spaces around Chinese characters, NFD, lower case."""
_PLAIN_NORMALIZERS = {**_UNICODE_FORMS, "Lowercase": _LOWERCASE, "Strip": 1.0, "StripAccents": 1.0}
_PLAIN_SPLITS = (
    "Whitespace",
    "WhitespaceSplit",
    "BertPreTokenizer",
    "Digits",
    "Punctuation",
    "UnicodeScripts",
    "CharDelimiterSplit",
    "FixedLength",
)
_PLAIN_DECODERS = ("ByteLevel", "ByteFallback", "Fuse", "WordPiece", "Metaspace", "Strip")
_PLAIN_PROCESSORS = ("ByteLevel", "BertProcessing", "RobertaProcessing")


class Rules(NamedTuple):
    """What is known of a tokenizer."""

    growth: float
    """Most bytes that a byte of a text becomes before it is split into tokens, at least 1; 1 where it is not known."""
    longest_entry_chars: int
    """Characters of the longest entry of the vocabulary."""
    unknown: str = ""
    """The first step that is not known to take bounded time and memory, and why; empty: all are known."""


class _NoBound(Exception):
    """A part has no known bound, or is of another form; the message names it."""


def check_rules(tokenizer_json: object) -> Rules:
    """Return what is known of a tokenizer's steps.

    Raises `UnreadableModelError` that names a part which no process of ours can read.
    """
    try:
        if not isinstance(tokenizer_json, dict):
            raise _wrong("tokenizer.json", tokenizer_json, "a JSON object")
        longest = _check_model(tokenizer_json.get("model"))
        _check_added_tokens(tokenizer_json.get("added_tokens"))
        _check_decoder(tokenizer_json)
    except _NoBound as problem:
        raise UnreadableModelError(
            f"the model's tokenizer cannot be used: {problem}. Use the tokenizer of the model's training."
        ) from None
    try:
        _check_search(tokenizer_json["model"], longest)
        _check_processor(tokenizer_json.get("post_processor"))
        return Rules(_text_growth(tokenizer_json), longest)
    except _NoBound as problem:
        return Rules(1.0, longest, str(problem))


def _check_decoder(tokenizer_json: _Step) -> None:
    decoded = 1.0
    for where, step in _steps(tokenizer_json, "decoder", "decoders"):
        decoded *= _decoded_growth(where, step)
    if decoded > MAX_DECODED_GROWTH:
        raise _refused(
            "decoder", f"its steps make a token up to {decoded:.3g} times as long; {MAX_DECODED_GROWTH:g} is the most"
        )


def _text_growth(tokenizer_json: _Step) -> float:
    growth = 1.0
    for part, inner, of_step in (
        ("normalizer", "normalizers", _normalized_growth),
        ("pre_tokenizer", "pretokenizers", _split_growth),
    ):
        growth *= _growth(tokenizer_json, part, inner, of_step)
        if growth > MAX_GROWTH:
            problem = f"a text becomes up to {growth:.3g} times as long; {MAX_GROWTH:g} is the most"
            raise _refused(part, problem)
    return growth


def _growth(tokenizer_json: _Step, part: str, inner: str, of_step: Callable[[str, _Step], tuple[float, bool]]) -> float:
    """Return the product of the steps. The first that spells characters in another way is free: what tokenizing a byte
    takes in `fitting` includes it."""
    growth, is_spelled = 1.0, False
    for where, step in _steps(tokenizer_json, part, inner):
        factor, spells = of_step(where, step)
        growth *= 1.0 if spells and not is_spelled else factor
        is_spelled |= spells
    return growth


def _normalized_growth(where: str, step: _Step) -> tuple[float, bool]:
    """Return the most bytes per byte, and whether the step spells characters in another way."""
    kind = step.get("type")
    if kind in _PLAIN_NORMALIZERS:
        return _PLAIN_NORMALIZERS[kind], False
    if kind == "BertNormalizer":
        return _BERT, False
    if kind == "ByteLevel":
        return 2.0, True
    if kind == "Prepend":
        _text(where, step, "prepend", 1)  # one character for each text between special tokens
        return 1.0, False
    if kind == "Replace":
        content, least = _text(where, step, "content", MAX_ENTRY_CHARS), _least_bytes(where, step)
        spells = step["pattern"] == {"String": " "} and len(content) == 1
        return max(1.0, len(content.encode()) / least), spells
    if kind == "Precompiled":
        return _precompiled_growth(where, step), False
    raise _unknown(where, kind)


def _precompiled_growth(where: str, step: _Step) -> float:
    charsmap = step.get("precompiled_charsmap")
    if not isinstance(charsmap, str):
        raise _wrong(f"{where}.precompiled_charsmap", charsmap, "text in base 64")
    try:
        return growth_of(charsmap)
    except DamagedCharsmap as error:
        raise _refused(f"{where}.precompiled_charsmap", str(error)) from None


def _split_growth(where: str, step: _Step) -> tuple[float, bool]:
    kind = step.get("type")
    if kind in _PLAIN_SPLITS:
        return 1.0, False
    if kind == "ByteLevel":
        return 3.0, True
    if kind == "Metaspace":
        _text(where, {"replacement": "▁", **step}, "replacement", 1)
        return 8.0, True
    if kind == "Split":
        _least_bytes(where, step)
        return 1.0, False
    raise _unknown(where, kind)


def _least_bytes(where: str, step: _Step) -> int:
    """Return the least bytes that a pattern matches, at least 1. Raises `_NoBound` unless it is linear."""
    pattern: Any = step.get("pattern")
    kind, source = next(iter(pattern.items())) if isinstance(pattern, dict) and len(pattern) == 1 else (None, None)
    if kind not in ("String", "Regex") or not isinstance(source, str) or not source:
        raise _wrong(f"{where}.pattern", pattern, "one `String` or `Regex` that is not empty")
    if kind == "String":
        _text(f"{where}.pattern", pattern, "String", MAX_ENTRY_CHARS)
        return len(source.encode())
    try:
        least = least_chars(source)
    except NotLinear as error:
        problem = f"the regular expression `{source[:_SHOWN]}` is not known to take linear time: {error}"
        raise _refused(f"{where}.pattern", problem) from None
    if not least:
        raise _refused(f"{where}.pattern", f"the regular expression `{source[:_SHOWN]}` matches nothing at all places")
    return least


def _decoded_growth(where: str, step: _Step) -> float:
    kind = step.get("type")
    if kind == "Replace":
        content = _text(where, step, "content", MAX_ENTRY_CHARS)
        return max(1.0, len(content.encode()) / _least_bytes(where, step))
    if kind not in _PLAIN_DECODERS:
        raise _refused(
            where,
            f"the step {_short(kind)} is not supported. Supported are byte-level BPE, SentencePiece with "
            "byte fallback, Metaspace and WordPiece decoders",
        )
    for name, default in (("replacement", "▁"), ("prefix", "##"), ("content", " ")):
        _text(where, {name: default, **step}, name, MAX_AFFIX_CHARS)
    for name in ("start", "stop"):
        if type(step.get(name, 0)) is not int or not 0 <= step.get(name, 0) <= MAX_AFFIX_CHARS:
            raise _wrong(f"{where}.{name}", step[name], f"a number from 0 to {MAX_AFFIX_CHARS}")
    return 1.0


def _check_model(model: object) -> int:
    """Check the vocabulary. Returns the characters of its longest entry."""
    if not isinstance(model, dict):
        raise _wrong("model", model, "an object")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):
        return _check_pieces(model, vocabulary)
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise _wrong("model.vocab", vocabulary, "an object with an id for each token")
    longest = _check_entries(vocabulary)
    _check_ids(vocabulary)
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name) is not None:
            _text("model", model, name, MAX_AFFIX_CHARS)
    unknown = model.get("unk_token")
    if "merges" not in model and unknown not in vocabulary:  # BPE needs it only where an unknown character can occur
        raise _wrong("model.unk_token", unknown, "a token of the vocabulary: unknown words have no other token")
    return longest


def _check_ids(vocabulary: _Step) -> None:
    """Check the largest id. The library refuses negative ones, and what is no number, without harm."""
    try:
        largest = max(vocabulary.values())
    except TypeError:  # of different types
        largest = None
    if type(largest) is not int or not 0 <= largest < _MAX_ID:
        raise _wrong("model.vocab", "an entry that is no id", f"a number from 0 to {_MAX_ID - 1} for each token")


def _check_pieces(model: _Step, pieces: list[Any]) -> int:
    """Check the vocabulary of a Unigram model. Returns the characters of its longest entry."""
    if not all(type(each) is list and len(each) == 2 and type(each[0]) is str for each in pieces):
        raise _wrong("model.vocab", "an entry of another form", "a list of pieces with their scores")
    longest = _check_entries([piece for piece, _ in pieces])
    unknown = model.get("unk_id")
    if type(unknown) is not int or not 0 <= unknown < len(pieces):
        raise _wrong("model.unk_id", unknown, f"the place of a piece, from 0 to {len(pieces) - 1}")
    return longest


def _check_search(model: _Step, longest: int) -> None:
    """Check how far from each place of a text a model looks for tokens."""
    if isinstance(model["vocab"], list) and longest > MAX_UNIGRAM_CHARS:
        raise _refused("model.vocab", f"a piece has {longest} characters; {MAX_UNIGRAM_CHARS} is the most")
    most = model.get("max_input_chars_per_word", 0)
    if type(most) is not int or not 0 <= most <= MAX_WORD_CHARS:
        raise _wrong("model.max_input_chars_per_word", most, f"a number from 0 to {MAX_WORD_CHARS}")


def _check_entries(entries: Any) -> int:
    """Return the characters of the longest entry."""
    if len(entries) > MAX_ENTRIES:
        raise _refused("model.vocab", f"it has {len(entries)} entries; {MAX_ENTRIES} is the most")
    longest = max(map(len, entries), default=0)
    if longest > MAX_ENTRY_CHARS:
        raise _refused("model.vocab", f"an entry has {longest} characters; {MAX_ENTRY_CHARS} is the most")
    return longest


def _check_added_tokens(tokens: object) -> None:
    if tokens is not None and not isinstance(tokens, list):
        raise _wrong("added_tokens", tokens, "a list")
    if len(tokens or []) > MAX_ADDED_TOKENS:
        raise _refused("added_tokens", f"it has {len(tokens or [])} entries; {MAX_ADDED_TOKENS} is the most")
    num_chars = 0
    for index, token in enumerate(tokens or []):
        where = f"added_tokens[{index}]"
        if not isinstance(token, dict):
            raise _wrong(where, token, "an object")
        num_chars += len(_text(where, token, "content", MAX_ENTRY_CHARS))
        if type(token.get("id")) is not int or not 0 <= token["id"] < _MAX_ID:
            raise _wrong(f"{where}.id", token.get("id"), f"a number from 0 to {_MAX_ID - 1}")
    if num_chars > MAX_ADDED_CHARS:
        raise _refused("added_tokens", f"they have {num_chars} characters in all; {MAX_ADDED_CHARS} is the most")


def _check_processor(processor: object) -> None:
    """Check that a post-processor adds a bounded number of tokens to each text and repeats none."""
    for where, step in _steps({"post_processor": processor}, "post_processor", "processors"):
        kind = step.get("type")
        if kind in _PLAIN_PROCESSORS:
            continue
        if kind != "TemplateProcessing":
            raise _unknown(where, kind)
        for name, texts in (("single", ["A"]), ("pair", ["A", "B"])):
            pieces = step.get(name)
            if not isinstance(pieces, list) or len(pieces) > MAX_TEMPLATE_PIECES:
                raise _wrong(f"{where}.{name}", pieces, f"a list of at most {MAX_TEMPLATE_PIECES} pieces")
            found = [
                each["Sequence"].get("id")
                for each in pieces
                if isinstance(each, dict) and isinstance(each.get("Sequence"), dict)
            ]
            if any(found.count(each) > 1 for each in texts):
                raise _wrong(f"{where}.{name}", found, "a list with each text once")
        special = step.get("special_tokens")
        for each in special.values() if isinstance(special, dict) else []:
            ids = each.get("ids") if isinstance(each, dict) else None
            if not isinstance(ids, list) or len(ids) > MAX_TEMPLATE_PIECES:
                raise _wrong(f"{where}.special_tokens", each, f"tokens with at most {MAX_TEMPLATE_PIECES} ids")


def _steps(tokenizer_json: _Step, part: str, inner: str) -> Iterator[tuple[str, _Step]]:
    """Yield the path and the content of each step of a part, those of nested sequences in order."""
    found = list(_flat(part, tokenizer_json.get(part), inner, 0))
    if len(found) > MAX_STEPS:
        raise _refused(part, f"it has {len(found)} steps; {MAX_STEPS} is the most")
    yield from found


def _flat(where: str, step: object, inner: str, depth: int) -> Iterator[tuple[str, _Step]]:
    if step is None:
        return
    if not isinstance(step, dict):
        raise _wrong(where, step, "an object")
    if step.get("type") != "Sequence":
        yield where, step
        return
    steps = step.get(inner)
    if not isinstance(steps, list) or len(steps) > MAX_STEPS or depth >= MAX_DEPTH:
        raise _wrong(f"{where}.{inner}", steps, f"a list of at most {MAX_STEPS} steps, nested at most {MAX_DEPTH} deep")
    for index, each in enumerate(steps):
        yield from _flat(f"{where}.{inner}[{index}]", each, inner, depth + 1)


def _text(where: str, values: _Step, name: str, most_chars: int) -> str:
    value = values.get(name)
    if not isinstance(value, str) or len(value) > most_chars:
        raise _wrong(f"{where}.{name}", value, f"text of at most {most_chars} characters")
    return value


def _unknown(where: str, kind: object) -> _NoBound:
    return _refused(where, f"the step {_short(kind)} is not known to take bounded time and memory")


def _wrong(where: str, value: object, wanted: str) -> _NoBound:
    problem = "is missing" if value is None else f"is {_short(value)}"
    return _NoBound(f"`{where}` {problem}; it must be {wanted}")


def _refused(where: str, problem: str) -> _NoBound:
    return _NoBound(f"`{where}`: {problem}")


def _short(value: object) -> str:
    """Return a value as in JSON, cut: the file's text can be of any length."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} entries"
    return f"`{str(value)[:_SHOWN]}`"
