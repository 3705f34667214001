"""Turns prompts and conversations of the offline API into engine requests: encodes, truncates and checks them.

`LLM` and `AsyncLLM` each have a `PromptEncoder`; `offline` reads the arguments. It also returns Hugging Face's
tokenizer. It uses no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from pagemill_api.grammars.check import CHECKS
from pagemill_api.text.bad_words import with_bad_words
from pagemill_api.text.control_tokens import without_marks
from pagemill_api.text.reuse_points import points_of_plain
from pagemill_api.text.template.chat_template import ChatTemplate
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_api.text.turn_end import warn_of_turn_end
from pagemill_engine.config import EngineConfig
from pagemill_engine.offline import Message, Prompt, check_tokens, conversations_of, prompts_of, sampling_of
from pagemill_execution.starting.opened_model import open_model
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_models.tokenizer_files.resolved_defaults import with_defaults
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import SamplingParams


class EncodedPrompt(NamedTuple):
    text: str | None
    """The prompt's text; None if token ids were given."""
    token_ids: list[int]
    sampling: SamplingParams


class PromptEncoder:
    """Encodes prompts. Raises `SourceError` or `PagemillError` if the model's tokenizer cannot be used."""

    def __init__(self, config: EngineConfig) -> None:
        self.opened = open_model(config)
        """The opened model. Weights may still be being fetched while an engine loads."""
        path = self.opened.path
        bundle = load_bundle(path)
        bundle = with_defaults(bundle, config.generation_config, config.generation_defaults)
        spec = load_model_spec(path)
        bundle = msgspec.structs.replace(bundle, pooling=spec.pooling, has_states=spec.has_states)
        self.tokenizer = Tokenizer(bundle, chat_template=config.chat_template)
        self.tokenizer.check_limits()
        self.config = msgspec.structs.replace(
            config,
            model_folder=self.opened.folder,
            eos_token_ids=config.eos_token_ids or list(bundle.eos_token_ids),
            vocab_size=config.vocab_size or self.tokenizer.vocab_size,
        )
        self.max_model_len = config.max_model_len or 0
        """Limit of a request's tokens; 0 if it is not known yet."""
        self._has_checked_template = False

    def default_sampling(self) -> SamplingParams:
        return SamplingParams(**self.tokenizer.bundle.sampling_defaults)

    def prompts(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[EncodedPrompt]:
        """Return each prompt with its parameters.

        Raises `PagemillError` that names the prompt or parameter at fault.
        """
        given = prompts_of(prompts)
        samplings = sampling_of(params, len(given), self.default_sampling())
        return [
            self._encoded(prompt, f"prompts[{index}]", sampling)
            for index, (prompt, sampling) in enumerate(zip(given, samplings, strict=True))
        ]

    def chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        chat_template: str | None = None,
        **rendering: Any,
    ) -> list[EncodedPrompt]:
        """Return each conversation as an encoded prompt.

        `rendering`: arguments of `Tokenizer.render_chat`. `chat_template`: replaces the model's template.
        """
        conversations = conversations_of(messages)
        if self._control_tokens_are_text:
            controls = self.tokenizer.control_tokens
            conversations = [controls.shielded_messages([dict(each) for each in found]) for found in conversations]
            rendering = controls.shielded(rendering)
        samplings = sampling_of(params, len(conversations), self.default_sampling())
        template = self.tokenizer.chat_template
        if not self._has_checked_template:
            self._has_checked_template = True
            warn_of_turn_end(self.tokenizer)
        if chat_template is not None:
            template = ChatTemplate(self.tokenizer.bundle, override=chat_template)
        try:
            texts = [template.render(each, **rendering) for each in conversations]
        finally:
            if chat_template is not None:
                template.close()
        return [
            self._encoded(text, "messages", sampling, is_chat=True)
            for text, sampling in zip(texts, samplings, strict=True)
        ]

    def request(
        self, prompt: EncodedPrompt, request_id: str, priority: int = 0, adapter_digest: str = ""
    ) -> GenerateRequest:
        """Return the engine request. Raises `PagemillError` for parameters that this model does not support."""
        sampling = with_bad_words(prompt.sampling.validate(self.tokenizer.vocab_size), self.tokenizer)
        if sampling.structured_outputs is not None:
            CHECKS.check(sampling.structured_outputs)
        return GenerateRequest(
            request_id=request_id,
            model=self.config.model,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            reuse_points=points_of_plain(self.tokenizer, len(prompt.token_ids)),
            dialect="completions",
            priority=priority,
            adapter_digest=adapter_digest,
        )

    def hugging_face(self) -> Any:
        """Return Hugging Face's tokenizer of the model; without `transformers`, Pagemill's own."""
        try:
            from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds to import
        except ImportError:
            return self.tokenizer
        path = self.opened.whole()
        if path.is_dir():
            return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        from tokenizers import Tokenizer as Backend

        bundle = self.tokenizer.bundle
        names = {"bos_token": bundle.bos_token, "eos_token": bundle.eos_token, **bundle.special_tokens}
        make: Any = PreTrainedTokenizerFast
        return make(
            tokenizer_object=Backend.from_str(bundle.tokenizer_json),
            chat_template=bundle.chat_template,
            clean_up_tokenization_spaces=False,
            **{name: token for name, token in names.items() if token is not None},
        )

    def close(self) -> None:
        self.tokenizer.close()

    @property
    def _control_tokens_are_text(self) -> bool:
        """Whether control tokens in messages are text."""
        return self.config.chat_control_tokens == "text"

    def _encoded(
        self, prompt: str | list[int], param: str, sampling: SamplingParams, *, is_chat: bool = False
    ) -> EncodedPrompt:
        shielded = is_chat and self._control_tokens_are_text
        text = prompt if isinstance(prompt, str) else None
        cut = sampling.truncate_prompt_tokens
        if not isinstance(prompt, str):
            token_ids = prompt
        elif cut is None:
            token_ids = self.tokenizer.encode_within(
                prompt, self.max_model_len, not is_chat, param=param, shielded=shielded
            )
        else:
            token_ids = self.tokenizer.encode_within(prompt, 0, not is_chat, param=param, shielded=shielded)
        check_tokens(token_ids, param, self.tokenizer.vocab_size)
        if cut is not None:
            sampling.validate()
            token_ids = sampling.truncate_prompt(token_ids, self.max_model_len)
        return EncodedPrompt(without_marks(text) if text is not None and shielded else text, token_ids, sampling)
