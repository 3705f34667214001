"""Pre-tokenizers of byte-level BPE, which split text into words, by their names in `tokenizer.ggml.pre` of GGUF files.

The patterns are those with which the vocabularies were trained (published in the models' tokenizer.json files). A wrong
one changes the ids of ordinary text without any error, so unknown names are refused and not guessed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_REST = r"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + "|" + _WORDS_AND_REST.format(digits=r"\p{N}{1,3}")
_QWEN2 = _CONTRACTIONS + "|" + _WORDS_AND_REST.format(digits=r"\p{N}")
_QWEN35 = _CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CASED_WORDS = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{suffix}"
    r"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{suffix}"
    r"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED_WORDS.format(suffix="", digits=r"\p{N}")
_NO_HAN = r"&&[^\p{Han}]"
_KIMI = r"[\p{Han}]+|" + _CASED_WORDS.format(suffix=_CONTRACTIONS + "?", digits=r"\p{N}{1,3}").replace(
    r"\p{M}]", r"\p{M}" + _NO_HAN + "]"
).replace(r"[\r\n/]*", r"[\r\n]*")
_GPT4O = _CASED_WORDS.format(suffix=_CONTRACTIONS + "?", digits=r"\p{N}{1,3}")


class PreTokenizer(NamedTuple):
    """A pre-tokenizer. `splits`: patterns applied one after the other, each isolating its matches."""

    splits: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a word that is a token is encoded without applying merges."""
    adds_bos: bool = False
    """Default of files without `add_bos_token`."""
    nfc: bool = False
    """Whether text is converted to Unicode normalization form C first."""

    def to_json(self) -> dict[str, Any]:
        """Return the pre-tokenizer in the `tokenizers` format."""
        steps: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.splits
        ]
        return {"type": "Sequence", "pretokenizers": [*steps, _BYTES]}


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

_GPT2_LIKE = PreTokenizer((_GPT2,))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9]{3}"))
"""llama.cpp's behaviour for `default`, which converters write for unknown vocabularies."""
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_LIKE = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_QWEN2_LIKE = PreTokenizer((_QWEN2,), nfc=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2_LIKE,
    "gpt2": _GPT2_LIKE,
    "default": _DEFAULT,
    "phi-2": _GPT2_LIKE,
    "mpt": _GPT2_LIKE,
    "olmo": _GPT2_LIKE,
    "exaone4": _GPT2_LIKE,
    "mellum": _GPT2_LIKE,
    "bloom": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "exaone": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3_LIKE,
    "llama3": _LLAMA3_LIKE,
    "llama-v3": _LLAMA3_LIKE,
    "falcon3": _LLAMA3_LIKE,
    "falcon-h1": _LLAMA3_LIKE,
    "pixtral": _LLAMA3_LIKE,
    "midm-2.0": _LLAMA3_LIKE,
    "lfm2": _LLAMA3_LIKE,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,)),
    "qwen2": _QWEN2_LIKE,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "hunyuan": PreTokenizer((_QWEN2,)),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
    "hunyuan-dense": PreTokenizer(_DEEPSEEK_V3),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "kormo": _QWEN2_LIKE,
    "megrez": _QWEN2_LIKE,
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "minimax-m2": PreTokenizer((_GPT4O,)),
    "kanana2": PreTokenizer((_GPT4O,)),
}
