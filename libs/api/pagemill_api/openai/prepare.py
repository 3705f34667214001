"""Prepare a checked request for an engine: render, tokenize, apply all limits.

The gateway, or the engine's own HTTP process, calls this once per request, off its event loop: rendering and tokenizing
long prompts takes milliseconds. Ids, clock, seed and cache salt come from the caller, so the functions are pure.
Admission is not decided here, but by the gateway and the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from pagemill_api.openai.chat_form import check_schemas, prescribed
from pagemill_api.openai.chat_format import ChatFormat, chat_format, without_later_system
from pagemill_api.openai.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from pagemill_api.text.bad_words import with_bad_words
from pagemill_api.text.fill_in_middle import fill_in_middle
from pagemill_api.text.fitting import LARGEST_CONTEXT
from pagemill_api.text.reuse_points import points_of_plain, reuse_points
from pagemill_api.text.template.chat_template import TEMPLATE_ERROR
from pagemill_protocol.errors import PagemillError, beyond_context, context_length_exceeded, invalid_field
from pagemill_protocol.request.answer_format import ParserSettings
from pagemill_protocol.request.generate import GenerateRequest, check_answer, most_tokens_of_values
from pagemill_protocol.request.sampling import MAX_ANSWER_VALUES, SamplingParams

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer

MAX_TOKENS_OF_SEVERAL = 1024 * 1024
"""Maximum total number of tokens of the prompts of one request, if there are several."""
_AUTO = ParserSettings()
_SHARED_FIELDS = [name for name in SamplingParams.__struct_fields__ if name in SamplingFields.model_fields]


def sampling_of(
    req: ChatCompletionRequest | CompletionRequest,
    *,
    seed: int | None = None,
    defaults: Mapping[str, Any] = {},
) -> SamplingParams:
    """Return the sampling parameters, checked as far as possible without a model, before any expensive work.

    `defaults`: the model's. Other arguments as in `prepare_chat`. Raises `PagemillError` 400.
    """
    if isinstance(req, CompletionRequest):
        return _sampling(req, req.requested_tokens, "max_tokens", req.logprobs, seed, defaults)
    logprobs = req.top_logprobs if req.logprobs else None
    return _sampling(req, req.requested_tokens, req.max_tokens_field, logprobs, seed, defaults)


def within_vocabulary(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return `sampling`, also checked for this model, before its prompt is rendered. Raises `PagemillError` 400."""
    named = sampling.stop_token_ids, sampling.logit_bias, sampling.allowed_token_ids, sampling.logprob_token_ids
    if any(named) or sampling.use_beam_search:
        sampling.validate(tokenizer.vocab_size)
    return with_bad_words(sampling, tokenizer)


def needs_check(fields: SamplingFields) -> bool:
    """Whether `check_form` has anything to compile."""
    return fields.form is not None or (
        isinstance(fields, ChatCompletionRequest) and (fields.constrains_calls or bool(fields.call_forms))
    )


def check_form(fields: SamplingFields) -> None:
    """Refuse a form of answers that cannot be compiled. Blocks while it is compiled. Raises `PagemillError` 400."""
    if isinstance(fields, ChatCompletionRequest) and (fields.constrains_calls or fields.call_forms):
        check_schemas(fields)
    if fields.form is None:
        return
    from pagemill_api.grammars.check import CHECKS  # imported late, since few requests need it

    param, outputs = fields.form
    CHECKS.check(outputs, param)


def prepare_chat(
    req: ChatCompletionRequest,
    tokenizer: Tokenizer,
    *,
    max_model_len: int,
    request_id: str,
    created_unix_s: int,
    cache_salt: str = "",
    seed: int | None = None,
    sampling: SamplingParams | None = None,
    text: str | None = None,
    parsers: ParserSettings = _AUTO,
    max_answer_values: int = MAX_ANSWER_VALUES,
) -> GenerateRequest:
    """Render and tokenize a chat; without a limit the answer may fill the context. Raises `PagemillError` 400.

    `sampling` and `text`: results of `within_vocabulary` and `render_inline`, if they were called. `seed` and the
    model's own sampling values apply where the client sent none. `max_model_len` 0: not known; the engine checks the
    length. `max_answer_values`: as that of `Preparation`.
    """
    defaults = tokenizer.bundle.sampling_defaults
    sampling = sampling or within_vocabulary(sampling_of(req, seed=seed, defaults=defaults), tokenizer)
    form = chat_format(req, tokenizer, parsers)
    if form.hides_markers:
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
    if text is None:
        text = _render(form, req, tokenizer, parsers)
    outputs = prescribed(req, form.syntax, form.reasoning, text)
    if outputs is not sampling.structured_outputs:
        sampling = msgspec.structs.replace(sampling, structured_outputs=outputs)
    special, shielded = req.add_special_tokens, parsers.control_tokens == "text"
    token_ids = _encode(tokenizer, text, special, max_model_len, "messages", sampling, cache_salt, shielded)
    lengths = len(token_ids), req.requested_tokens, defaults.get("max_tokens"), max_model_len
    max_tokens = _answer_budget(*lengths, "messages", req.max_tokens_field)
    request = GenerateRequest(
        request_id=request_id,
        response_id=_response_id(req, request_id, several=False),
        model=req.model,
        prompt_token_ids=token_ids,
        sampling=_limited(sampling, max_tokens),
        predicted_token_ids=_predicted(req, tokenizer, max_model_len, cache_salt),
        reuse_points=reuse_points(tokenizer, text, form.messages, token_ids) if tokenizer.bundle.has_states else [],
        dialect="chat",
        answer_format=form.answer_format_after(text),
        return_token_ids=req.return_token_ids,
        keeps_logprobs=req.keeps_logprobs,
        created_unix_s=created_unix_s,
        stream=req.stream,
        include_usage=req.include_usage,
        continuous_usage=req.continuous_usage,
        priority=req.priority,
        cache_salt=cache_salt,
    )
    request = _fitting(request, req.requested_tokens, max_answer_values)
    check_answer([request], max_answer_values, req.max_tokens_field)
    return request


def prepare_completions(
    req: CompletionRequest,
    tokenizer: Tokenizer,
    *,
    max_model_len: int,
    request_id: str,
    created_unix_s: int,
    cache_salt: str = "",
    seed: int | None = None,
    sampling: SamplingParams | None = None,
    max_answer_values: int = MAX_ANSWER_VALUES,
) -> list[GenerateRequest]:
    """Return one request per prompt, in order; several get ids `REQUEST_ID-INDEX` and share `response_id`.

    Arguments as in `prepare_chat`. Raises `PagemillError` 400.
    """
    several = len(req.prompt) > 1
    defaults = tokenizer.bundle.sampling_defaults
    sampling = sampling or within_vocabulary(sampling_of(req, seed=seed, defaults=defaults), tokenizer)
    usual_tokens = defaults.get("max_tokens", DEFAULT_COMPLETION_TOKENS)
    requests: list[GenerateRequest] = []
    num_tokens = 0
    for index, prompt in enumerate(req.prompt):
        param = f"prompt[{index}]" if several else "prompt"
        token_ids = _prompt_tokens(prompt, req, tokenizer, max_model_len, param, sampling, cache_salt)
        num_tokens += len(token_ids)
        if several and num_tokens > MAX_TOKENS_OF_SEVERAL:
            raise _too_many_together(index + 1, len(req.prompt), num_tokens)
        max_tokens = _answer_budget(
            len(token_ids), req.requested_tokens, usual_tokens, max_model_len, param, "max_tokens"
        )
        requests.append(
            GenerateRequest(
                request_id=f"{request_id}-{index}" if several else request_id,
                response_id=_response_id(req, request_id, several=several),
                model=req.model,
                prompt_token_ids=token_ids,
                sampling=_limited(sampling, max_tokens),
                reuse_points=points_of_plain(tokenizer, len(token_ids)),
                dialect="completions",
                created_unix_s=created_unix_s,
                stream=req.stream,
                include_usage=req.include_usage,
                continuous_usage=req.continuous_usage,
                priority=req.priority,
                prompt_text=_echo_text(prompt, token_ids, req, tokenizer),
                prompt_only=req.prompt_only,
                return_token_ids=req.return_token_ids,
                prompt_index=index,
                cache_salt=cache_salt,
            )
        )
    requests = [_fitting(each, req.requested_tokens, max_answer_values, len(requests)) for each in requests]
    check_answer(requests, max_answer_values)
    return requests


def tokenize(
    req: TokenizeRequest, tokenizer: Tokenizer, max_model_len: int, parsers: ParserSettings = _AUTO
) -> list[int]:
    """Return the token ids of a prompt, or of rendered messages. Raises `PagemillError` 400 beyond the context."""
    if req.messages is None:
        assert req.prompt is not None  # the schema requires exactly one
        return tokenizer.encode_within(req.prompt, max_model_len, req.add_special_tokens is not False)
    shielded = parsers.control_tokens == "text"
    text = render(req, tokenizer, _AUTO._replace(control_tokens=parsers.control_tokens))
    special = bool(req.add_special_tokens)
    return tokenizer.encode_within(text, max_model_len, special, param="messages", shielded=shielded)


def num_prompt_tokens(req: ChatCompletionRequest, tokenizer: Tokenizer, parsers: ParserSettings, scope: str) -> int:
    """Return the number of tokens of a chat's prompt, whatever the context is. Raises `PagemillError` 400.

    `scope`: the cache salt of the request.
    """
    text, shielded = render(req, tokenizer, parsers), parsers.control_tokens == "text"
    special = req.add_special_tokens
    return len(tokenizer.encode_within(text, 0, special, param="messages", scope=scope, shielded=shielded))


def detokenize(req: DetokenizeRequest, tokenizer: Tokenizer, max_model_len: int) -> str:
    """Return the text of token ids, special tokens included. Raises `PagemillError` 400 for more than a context has."""
    max_tokens = max_model_len or LARGEST_CONTEXT
    if len(req.tokens) > max_tokens:
        raise beyond_context(max_tokens, f"`tokens` has {len(req.tokens)} ids. Send fewer at once.", "tokens")
    _check_vocabulary(req.tokens, tokenizer, "tokens")
    return tokenizer.decode(req.tokens, skip_special_tokens=False)


async def render_inline(req: ChatCompletionRequest, tokenizer: Tokenizer, parsers: ParserSettings) -> str | None:
    """Render the prompt of a short chat on the event loop, or return None: then `prepare_chat` renders it.

    Raises `PagemillError` 400.
    """
    form = chat_format(req, tokenizer, parsers)
    rendering = _rendering(req, tokenizer, parsers)
    try:
        return await tokenizer.chat_template.render_inline(form.messages, tools=form.tools, **rendering)
    except PagemillError as error:
        if not _may_move_system(error, form, req):
            raise
        return None


def render(req: ChatCompletionRequest | TokenizeRequest, tokenizer: Tokenizer, parsers: ParserSettings) -> str:
    """Render the prompt of a chat. Raises `PagemillError` 400."""
    return _render(chat_format(req, tokenizer, parsers), req, tokenizer, parsers)


def _render(
    form: ChatFormat, req: ChatCompletionRequest | TokenizeRequest, tokenizer: Tokenizer, parsers: ParserSettings
) -> str:
    rendering = _rendering(req, tokenizer, parsers)
    try:
        return tokenizer.render_chat(form.messages, tools=form.tools, **rendering)
    except PagemillError as error:
        if not _may_move_system(error, form, req):
            raise
    return tokenizer.render_chat(without_later_system(form.messages), tools=form.tools, **rendering)


def _may_move_system(error: PagemillError, form: ChatFormat, req: ChatCompletionRequest | TokenizeRequest) -> bool:
    """Whether a template that refuses these messages may take them with all later system messages in the user's."""
    return (
        error.code == TEMPLATE_ERROR
        and req.may_move_system
        and any(message["role"] == "system" for message in form.messages[1:])
    )


def _rendering(
    req: ChatCompletionRequest | TokenizeRequest, tokenizer: Tokenizer, parsers: ParserSettings
) -> dict[str, Any]:
    given = req.template_kwargs
    if given and parsers.control_tokens == "text":
        given = tokenizer.control_tokens.shielded(given)
    return {
        "add_generation_prompt": req.add_generation_prompt and not req.continue_final_message,
        "continue_final_message": req.continue_final_message,
        "template_kwargs": given or None,
    }


def _prompt_tokens(
    prompt: str | list[int],
    req: CompletionRequest,
    tokenizer: Tokenizer,
    max_model_len: int,
    param: str,
    sampling: SamplingParams,
    scope: str,
) -> list[int]:
    if isinstance(prompt, str):
        text = fill_in_middle(tokenizer, prompt, req.suffix) if req.suffix else prompt
        return _encode(tokenizer, text, req.add_special_tokens, max_model_len, param, sampling, scope)
    _check_vocabulary(prompt, tokenizer, param)
    return sampling.truncate_prompt(prompt, max_model_len)


def _encode(
    tokenizer: Tokenizer,
    text: str,
    special: bool,
    max_model_len: int,
    param: str,
    sampling: SamplingParams,
    scope: str,
    shielded: bool = False,
) -> list[int]:
    most = max_model_len if sampling.truncate_prompt_tokens is None else LARGEST_CONTEXT
    token_ids = tokenizer.encode_within(text, most, special, param=param, scope=scope, shielded=shielded)
    if not token_ids:
        raise invalid_field(param, f"`{param}` has no tokens. Send some text.")
    return sampling.truncate_prompt(token_ids, max_model_len)


def _predicted(req: ChatCompletionRequest, tokenizer: Tokenizer, max_model_len: int, scope: str) -> list[int]:
    """Return the tokens of the text that the answer probably repeats. Control tokens in it are text, as in answers."""
    if req.prediction is None or not req.prediction.content:
        return []
    return tokenizer.encode_within(
        req.prediction.content, max_model_len, False, param="prediction.content", scope=scope, shielded=True
    )


def _response_id(req: SamplingFields, request_id: str, *, several: bool) -> str:
    """Return the response id with the client's own request id, if it sent one. Engines use the server's unique id."""
    if req.request_id is not None:
        return f"{request_id.partition('-')[0]}-{req.request_id}"
    return request_id if several else ""


def _too_many_together(num_prompts: int, num_all: int, num_tokens: int) -> PagemillError:
    return invalid_field(
        "prompt",
        f"The first {num_prompts} of {num_all} prompts have {num_tokens} tokens; at most {MAX_TOKENS_OF_SEVERAL} are "
        "allowed in one request. Send the prompts in several requests.",
    )


def _check_vocabulary(token_ids: list[int], tokenizer: Tokenizer, param: str) -> None:
    largest = max(token_ids)
    if largest >= tokenizer.vocab_size:
        raise invalid_field(
            param,
            f"`{param}` has the token id {largest}; this model's token ids go from 0 to {tokenizer.vocab_size - 1}.",
        )


def _answer_budget(
    num_prompt_tokens: int,
    requested: int | None,
    default: int | None,
    max_model_len: int,
    prompt_param: str,
    limit_param: str,
) -> int | None:
    """Return the maximum tokens of the answer: as requested, else the default, else the rest of the context."""
    if max_model_len <= 0:
        return requested if requested is not None else default
    num_left = max_model_len - num_prompt_tokens
    if num_left < 1:
        raise context_length_exceeded(num_prompt_tokens, max_model_len, prompt_param)
    if requested is None:
        return num_left if default is None else min(default, num_left)
    if requested > num_left:
        raise beyond_context(
            max_model_len,
            f"The prompt has {num_prompt_tokens} tokens and `{limit_param}` asks for {requested} more, together "
            f"{num_prompt_tokens + requested}. Send `{limit_param}` of at most {num_left}, or shorten the prompt.",
            limit_param,
            num_prompt_tokens=num_prompt_tokens,
            num_answer_tokens=requested,
        )
    return requested


def _sampling(
    req: SamplingFields,
    max_tokens: int | None,
    limit_param: str,
    logprobs: int | None,
    seed: int | None,
    defaults: Mapping[str, Any],
) -> SamplingParams:
    if max_tokens is not None and max_tokens < 1:
        raise invalid_field(limit_param, f"`{limit_param}` must be an integer of at least 1, got {max_tokens}.")
    values = {name: getattr(req, name) for name in _SHARED_FIELDS}
    if not req.use_beam_search:  # a model's defaults concern sampling, which beam search does not do
        missing = defaults.keys() - req.model_fields_set
        values |= {name: defaults[name] for name in missing if name in values}
    if values["top_p"] == 0:  # clients mean the most likely token alone
        values |= {"temperature": 0.0, "top_p": 1.0}
    return SamplingParams(
        **{
            **values,
            "best_of": req.num_sequences if req.num_sequences > req.n else None,
            "seed": req.seed if req.seed is not None else seed,
            "logit_bias": req.logit_bias or None,
            "logprobs": logprobs,
            "logprob_token_ids": req.logprob_token_ids or None,
            "allowed_token_ids": req.allowed_token_ids or None,
            "max_tokens": max_tokens,
            "structured_outputs": req.form[1] if req.form is not None else None,
        }
    ).validate()


def _limited(sampling: SamplingParams, max_tokens: int | None) -> SamplingParams:
    """Return `sampling` with the answer's token limit, which depends on the prompt's length."""
    if max_tokens == sampling.max_tokens:
        return sampling
    limited = msgspec.structs.replace(sampling, max_tokens=max_tokens)
    return limited.validate() if sampling.min_tokens else limited


def _fitting(
    request: GenerateRequest, requested: int | None, max_answer_values: int, num_prompts: int = 1
) -> GenerateRequest:
    """Return the request with as many tokens as fit into an answer, if the client sent no limit."""
    most = None if requested is not None else most_tokens_of_values(request, max_answer_values, num_prompts)
    max_tokens = request.sampling.max_tokens
    if not most or (max_tokens is not None and max_tokens <= most):
        return request
    return msgspec.structs.replace(request, sampling=_limited(request.sampling, most))


def _echo_text(
    prompt: str | list[int], token_ids: list[int], req: CompletionRequest, tokenizer: Tokenizer
) -> str | None:
    if not req.echo:
        return None
    if isinstance(prompt, str) and req.truncate_prompt_tokens is None:
        return prompt
    return tokenizer.decode(token_ids, skip_special_tokens=req.skip_special_tokens)
