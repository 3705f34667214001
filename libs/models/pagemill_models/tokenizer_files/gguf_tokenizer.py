"""Make a TokenizerBundle from a GGUF file's `tokenizer.*` metadata.

Supported are byte-level BPE (`tokenizer.ggml.model` = `gpt2`) and SentencePiece BPE (`llama`, and Gemma 4's). The
result is in the JSON format of the `tokenizers` library, which does the encoding; nothing here runs per request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

from pagemill_models.files.gguf_file import GGUFError, GGUFFile, StringArray
from pagemill_models.files.missing_values import warn_once
from pagemill_models.tokenizer_files import sentencepiece
from pagemill_models.tokenizer_files.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from pagemill_protocol.tokenizer_bundle import END_TOKENS, TokenizerBundle, eos_ids

_PREFIX = "tokenizer.ggml."
_SENTENCEPIECE = ("llama", "gemma4")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_NAMED_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "cls", "mask")
"""The key `seperator_token_id` is written so."""
_MARKER = re.compile(r"<\|[^|<>\s]+\|>|<(?:start|end)_of_turn>")
_BY_ARCHITECTURE = {
    **{name: name for name in ("falcon", "bloom", "mpt", "olmo", "refact", "codeshell", "command-r", "exaone")},
    "gpt2": "gpt-2",
    "gptneox": "gpt-2",
    "phi2": "phi-2",
    "starcoder": "starcoder",
    "starcoder2": "starcoder",
}
"""Pre-tokenizers of architectures whose models all have the same one."""
_NFC = {"type": "NFC"}
MAX_TOKEN_CHARS = 2048
MAX_MERGE_CHARS = 2**29
"""Most characters of all ways to cut all pieces in two, which are tried for files without merges: a second's work."""
_BYTE_LEVEL_DECODER = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def bundle_from_gguf(file: GGUFFile) -> TokenizerBundle:
    """Return the bundle. Raises `GGUFError` when the metadata is missing, contradictory or unsupported."""
    return _Builder(file).build()


class _Builder:
    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._tokens = self._strings("tokens")
        longest = max(map(len, self._tokens))
        if longest > MAX_TOKEN_CHARS:
            raise self._error(f"a token of `{_PREFIX}tokens` has {longest} characters; {MAX_TOKEN_CHARS} is the most")
        self._types = self._token_types()
        self._ids: dict[str, int] = {}
        for token_id, token in enumerate(self._tokens):
            self._ids.setdefault(token, token_id)

    def build(self) -> TokenizerBundle:
        kind = self._file.get(f"{_PREFIX}model", str)
        if kind == "gpt2":
            tokenizer, adds_bos = self._byte_level()
        elif kind in _SENTENCEPIECE:
            tokenizer, adds_bos = self._sentencepiece()
        else:
            known = f"`gpt2`, {' and '.join(f'`{each}`' for each in _SENTENCEPIECE)}"
            raise self._error(f"the tokenizer model `{kind}` is not supported, only {known}")
        bos_id, eos_id = self._token_id("bos_token_id"), self._token_id("eos_token_id")
        if kind == "llama" and len(self._tokens) > 2:  # defaults of files without these keys
            bos_id, eos_id = (1 if bos_id is None else bos_id), (2 if eos_id is None else eos_id)
        add_bos = bool(self._file.get(f"{_PREFIX}add_bos_token", bool, adds_bos)) and bos_id is not None
        if add_bos and bos_id is not None:
            tokenizer["post_processor"] = bos_post_processor(self._tokens[bos_id], bos_id)
        declared = [eos_id, self._token_id("eot_token_id"), self._token_id("eom_token_id")]
        return TokenizerBundle(
            tokenizer_json=orjson.dumps(tokenizer).decode(),
            chat_template=self._file.get("tokenizer.chat_template", str),
            tool_chat_template=self._file.get("tokenizer.chat_template.tool_use", str),
            bos_token=self._text(bos_id),
            eos_token=self._text(eos_id),
            bos_token_id=bos_id,
            eos_token_ids=eos_ids(declared, self._control_ids()),
            add_bos_token=add_bos,
            special_tokens=self._named_tokens(),
            vocab_size=self._logit_rows(),
        )

    def _byte_level(self) -> tuple[dict[str, Any], bool]:
        pre = self._pre_tokenizer()
        model = {
            "type": "BPE",
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": self._ids,
            "merges": self._merges(),
        }
        return self._tokenizer(_NFC if pre.nfc else None, pre.to_json(), _BYTE_LEVEL_DECODER, model), pre.adds_bos

    def _sentencepiece(self) -> tuple[dict[str, Any], bool]:
        scores = self._file.get(f"{_PREFIX}scores", list)
        if scores is None or len(scores) != len(self._tokens):
            raise self._error(f"`{_PREFIX}scores` is missing or does not have one entry per token")
        has_merges = f"{_PREFIX}merges" in self._file.metadata
        if not has_merges and sum(len(token) ** 2 for token in self._tokens) > MAX_MERGE_CHARS:
            raise self._error(f"the tokens of `{_PREFIX}tokens` are too long for a file without `{_PREFIX}merges`")
        merges = self._merges() if has_merges else sentencepiece.merges(self._tokens, scores)
        unknown_id = self._token_id("unknown_token_id")
        prefix = bool(self._file.get(f"{_PREFIX}add_space_prefix", bool, True))
        model = sentencepiece.model_json(self._ids, merges, self._text(unknown_id))
        normalizer = sentencepiece.normalizer_json(add_space_prefix=prefix)
        return self._tokenizer(normalizer, None, sentencepiece.decoder_json(add_space_prefix=prefix), model), True

    def _tokenizer(
        self, normalizer: Any, pre_tokenizer: Any, decoder: dict[str, Any], model: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": None,
            "decoder": decoder,
            "model": model,
        }

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self._file.get(f"{_PREFIX}pre", str)
        if name is None:
            name = self._usual_pre_tokenizer()
        if name in PRE_TOKENIZERS:
            return PRE_TOKENIZERS[name]
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise self._error(f"the pre-tokenizer `{name}` (`{_PREFIX}pre`) is not supported. Supported: {known}")

    def _usual_pre_tokenizer(self) -> str:
        """Return the pre-tokenizer of a file that names none."""
        architecture = self._file.get("general.architecture", str, "")
        name = "qwen2" if architecture.startswith("qwen") else _BY_ARCHITECTURE.get(architecture)
        if name is not None:
            return name
        warn_once(
            f"`{self._file.path}` has no `{_PREFIX}pre`: text is split into words as for `gpt-2`, and where the model "
            "was trained on other words its tokens are wrong. Convert the model again, or add the key."
        )
        return "gpt-2"

    def _merges(self) -> list[tuple[str, str]]:
        pairs = []
        for index, merge in enumerate(self._strings("merges")):
            left, separator, right = merge.partition(" ")
            if not separator or left not in self._ids or right not in self._ids or left + right not in self._ids:
                raise self._error(f"entry {index} of `{_PREFIX}merges` ({merge[:80]!r}) does not join two known tokens")
            pairs.append((left, right))
        return pairs

    def _added_tokens(self) -> list[dict[str, Any]]:
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": self._types[token_id] != _USER_DEFINED,
            }
            for token, token_id in self._ids.items()
            if token and self._types[token_id] in (_UNKNOWN, _CONTROL, _USER_DEFINED) and not self._is_spaced(token_id)
        ]

    def _is_spaced(self, token_id: int) -> bool:
        """Whether a token contains the SentencePiece space: it must stay an ordinary piece, since it would never match
        as an added token."""
        return self._types[token_id] == _USER_DEFINED and sentencepiece.SPACE in self._tokens[token_id]

    def _control_ids(self) -> dict[str, int]:
        return {token: token_id for token, token_id in self._ids.items() if self._types[token_id] == _CONTROL}

    def _token_types(self) -> Sequence[int]:
        types = self._file.get(f"{_PREFIX}token_type", list)
        if types is None:
            warn_once(
                f"`{self._file.path}` has no `{_PREFIX}token_type`: the tokens that its metadata names and those that "
                "look like `<|...|>` are taken as control tokens, and all others as text. Convert the model again."
            )
            return self._usual_types()
        if len(types) != len(self._tokens):
            raise self._error(f"`{_PREFIX}token_type` has {len(types)} entries for {len(self._tokens)} tokens")
        return list(types)

    def _usual_types(self) -> list[int]:
        """Return the types of a file without types."""
        named = {self._token_id(f"{name}_token_id") for name in _NAMED_IDS}
        named |= {0, 1, 2} if self._file.get(f"{_PREFIX}model", str) == "llama" else set()
        return [
            _CONTROL if token_id in named or token in END_TOKENS or _MARKER.fullmatch(token) else _NORMAL
            for token_id, token in enumerate(self._tokens)
        ]

    def _strings(self, name: str) -> list[str]:
        array = self._file.get(f"{_PREFIX}{name}", StringArray)
        if array is None or not len(array):
            raise self._error(f"`{_PREFIX}{name}` is missing or empty")
        strings: list[str] = array.to_list()
        return strings

    def _token_id(self, name: str) -> int | None:
        token_id = self._file.get(f"{_PREFIX}{name}", int)
        if token_id is None or token_id == 0xFFFFFFFF or token_id == -1:
            return None
        if not 0 <= token_id < len(self._tokens):
            raise self._error(f"`{_PREFIX}{name}` is {token_id}, but there are {len(self._tokens)} tokens")
        return int(token_id)

    def _text(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._tokens[token_id]

    def _named_tokens(self) -> dict[str, str]:
        named = {"pad_token": self._token_id("padding_token_id"), "unk_token": self._token_id("unknown_token_id")}
        return {name: self._tokens[token_id] for name, token_id in named.items() if token_id is not None}

    def _logit_rows(self) -> int:
        tensor = self._file.tensors.get("output.weight") or self._file.tensors.get("token_embd.weight")
        return tensor.shape[0] if tensor is not None else len(self._tokens)

    def _error(self, message: str) -> GGUFError:
        return GGUFError(f"`{self._file.path}` has no usable tokenizer: {message}.")


def bos_post_processor(bos_token: str, bos_token_id: int) -> dict[str, Any]:
    """Return a post-processor in the `tokenizers` format that adds `bos_token` before every text with special
    tokens."""
    bos, text = {"SpecialToken": {"id": bos_token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos_token: {"id": bos_token, "ids": [bos_token_id], "tokens": [bos_token]}},
    }
