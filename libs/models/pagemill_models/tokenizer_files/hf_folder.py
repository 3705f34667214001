"""Make a TokenizerBundle from a Hugging Face model folder.

It reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json and the
chat template files, and runs no code of the folder. Only the post-processor of tokenizer.json decides which tokens
encoding adds, as in transformers 5; `add_bos_token` and `add_eos_token` are ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagemill_models.files.json_file import parse_object, read_optional, read_text
from pagemill_models.files.regular_file import exists
from pagemill_models.tokenizer_files.resolved_defaults import values_of_model
from pagemill_protocol.source_errors import UnreadableModelError
from pagemill_protocol.tokenizer_bundle import TokenizerBundle, eos_ids

MAX_STEPS = 64
_NAMED_TOKENS = ("pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def bundle_from_folder(folder: Path) -> TokenizerBundle:
    """Return the bundle. Raises `UnreadableModelError` when files are missing or contradictory."""
    return _Folder(folder).bundle()


class _Folder:
    def __init__(self, folder: Path) -> None:
        self._path = folder
        self._tokenizer_file = folder / "tokenizer.json"
        if not exists(self._tokenizer_file):
            raise UnreadableModelError(
                f"`{folder}` has no `tokenizer.json`. Write one with "
                "`transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`."
            )
        self._text = read_text(self._tokenizer_file)
        self._tokenizer = parse_object(self._text, self._tokenizer_file)
        self._settings = read_optional(folder / "tokenizer_config.json")
        self._special_map = read_optional(folder / "special_tokens_map.json")
        self._config = read_optional(folder / "config.json")
        self._generation = read_optional(folder / "generation_config.json")
        self._ids = self._vocabulary()

    def bundle(self) -> TokenizerBundle:
        bos_token, eos_token = self._named("bos_token"), self._named("eos_token")
        bos_id = self._ids.get(bos_token) if bos_token is not None else None
        chat, tools = self._chat_templates()
        return TokenizerBundle(
            tokenizer_json=self._text,
            chat_template=chat,
            tool_chat_template=tools,
            bos_token=bos_token,
            eos_token=eos_token,
            bos_token_id=bos_id,
            eos_token_ids=eos_ids(self._declared_eos_ids(eos_token), self._control_ids()),
            add_bos_token=bos_id is not None and _adds(self._tokenizer.get("post_processor"), bos_id),
            special_tokens={name: token for name in _NAMED_TOKENS if (token := self._named(name)) is not None},
            vocab_size=self._logit_rows(),
            sampling_defaults=values_of_model(self._generation),
        )

    def _chat_templates(self) -> tuple[str | None, str | None]:
        """Return (chat, chat with tools); template files override tokenizer_config.json, as in transformers."""
        named = self._settings.get("chat_template")
        if isinstance(named, str):
            named = [{"name": "default", "template": named}]
        templates: dict[str, str] = {}
        for entry in named if isinstance(named, list) else []:
            if (
                isinstance(entry, dict)
                and isinstance(entry.get("name"), str)
                and isinstance(entry.get("template"), str)
            ):
                templates[entry["name"]] = entry["template"]
        if exists(self._path / "chat_template.jinja"):
            templates["default"] = read_text(self._path / "chat_template.jinja")
        elif exists(self._path / "chat_template.json"):
            template = read_optional(self._path / "chat_template.json").get("chat_template")
            templates |= {"default": template} if isinstance(template, str) else {}
        further = self._path / "additional_chat_templates" / "tool_use.jinja"
        if exists(further):
            templates["tool_use"] = read_text(further, self._path)
        return templates.get("default"), templates.get("tool_use")

    def _declared_eos_ids(self, eos_token: str | None) -> list[int | None]:
        generation = self._generation.get("eos_token_id")
        text = self._config.get("text_config")
        of_text = text.get("eos_token_id") if isinstance(text, dict) else None
        config = self._config.get("eos_token_id", of_text)
        own = self._ids.get(eos_token) if eos_token is not None else None
        return [*_as_ids(generation), *_as_ids(config), own]

    def _named(self, name: str) -> str | None:
        for source in (self._settings, self._special_map):
            value = source.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                return value
        return None

    def _vocabulary(self) -> dict[str, int]:
        model = self._tokenizer.get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        ids: dict[str, int] = {}
        if isinstance(vocab, dict) and all(type(token_id) is int for token_id in vocab.values()):
            ids.update(vocab)
        elif isinstance(vocab, list):
            pieces = [entry[0] if isinstance(entry, list) and entry else None for entry in vocab]
            ids.update({piece: index for index, piece in enumerate(pieces) if isinstance(piece, str)})
        else:
            raise UnreadableModelError(f"`{self._tokenizer_file}` has no vocabulary (`model.vocab`).")
        ids.update({token["content"]: token["id"] for token in self._added_tokens()})
        return ids

    def _control_ids(self) -> dict[str, int]:
        return {token["content"]: token["id"] for token in self._added_tokens() if token.get("special")}

    def _added_tokens(self) -> list[dict[str, Any]]:
        tokens = self._tokenizer.get("added_tokens") or []
        if isinstance(tokens, list) and all(map(_is_token, tokens)):
            return tokens
        raise UnreadableModelError(f"`{self._tokenizer_file}`: an entry of `added_tokens` has no `id` and `content`.")

    def _logit_rows(self) -> int:
        rows = self._config.get("vocab_size")
        return rows if isinstance(rows, int) and rows > 0 else max(self._ids.values(), default=-1) + 1


def _is_token(entry: object) -> bool:
    return isinstance(entry, dict) and type(entry.get("id")) is int and isinstance(entry.get("content"), str)


def _as_ids(value: Any) -> list[int | None]:
    values = value if isinstance(value, list) else [value]
    return [entry for entry in values if isinstance(entry, int) and not isinstance(entry, bool)]


def _adds(post_processor: Any, token_id: int) -> bool:
    """Whether the post-processor adds `token_id` before a single text."""
    if not isinstance(post_processor, dict):
        return False
    if post_processor.get("type") == "Sequence":
        steps = post_processor.get("processors")
        return isinstance(steps, list) and len(steps) < MAX_STEPS and any(_adds(step, token_id) for step in steps)
    pieces, special = post_processor.get("single"), post_processor.get("special_tokens")
    if post_processor.get("type") != "TemplateProcessing" or not isinstance(pieces, list) or not pieces:
        return False
    first = pieces[0].get("SpecialToken") if isinstance(pieces[0], dict) else None
    name = first.get("id") if isinstance(first, dict) else None
    entry = special.get(name) if isinstance(special, dict) and isinstance(name, str) else None
    ids = entry.get("ids") if isinstance(entry, dict) else None
    return isinstance(ids, list) and token_id in ids
