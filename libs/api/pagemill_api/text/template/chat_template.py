"""Render a chat into the prompt that the model was trained on, with the model's own Jinja template.

Messages are checked and normalized (`chat_messages`); the template runs in a confined process (`sandbox.process`), or
its plain program runs here where it has one (`plain_template`); every failure becomes a 400 that names the field.
Tokenizing is done elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import weakref
from collections import deque
from typing import Any

import msgspec

from pagemill_api.sandbox.process import (
    MAX_INLINE_WRITE_BYTES,
    ExchangeError,
    LimitedProcess,
    ProcessLimits,
    TimeLimitReached,
    WorkerDied,
)
from pagemill_api.text.template.chat_messages import check_template_kwargs, normalize_messages
from pagemill_api.text.template.plain_template import PlainTemplate
from pagemill_protocol.errors import PagemillError, invalid_field, unavailable
from pagemill_protocol.source_errors import SourceError
from pagemill_protocol.tokenizer_bundle import TokenizerBundle

TEMPLATE_ERROR = "chat_template_error"
"""Code of the error of a template that refuses messages, or fails on them."""
MAX_PROCESSES = 2
"""Worker processes per template: one slow render does not delay the next."""
_CHAT, _TOOLS = "chat", "tools"
_CONTINUE_MARK = "\ue000pagemill:continue\ue001"


class ChatTemplate:
    """The templates of one model. Thread-safe; workers start at the first render and live until `close`.

    `override` replaces the bundle's templates. Raises `SourceError` for one that does not compile.
    """

    def __init__(
        self, bundle: TokenizerBundle, *, override: str | None = None, limits: ProcessLimits | None = None
    ) -> None:
        self._templates = _sources(bundle, override)
        self._constants = {**bundle.special_tokens, "bos_token": bundle.bos_token, "eos_token": bundle.eos_token}
        self._limits = limits or ProcessLimits()
        self._plain: dict[str, PlainTemplate] = {}
        """Plain programs by name; known once a process has read the templates."""
        self._slots = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: deque[LimitedProcess] = deque()
        self._finalizer = weakref.finalize(self, _close_all, self._idle)
        if override is not None:
            self._check_compiles()

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt. `continue_final_message` ends it inside the last message and implies no generation
        prompt."""
        name, variables = self._call(
            messages, add_generation_prompt, continue_final_message, tools, template_kwargs or {}
        )
        reply = self._run_plain(name, variables) or self._run(name, _to_json(variables))
        return _text_of(reply, continue_final_message)

    async def render_inline(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str | None:
        """Render as `render`, on an event loop. Returns None if it would have to wait: then call `render` in a thread.

        For short chats: waking a thread and sharing the interpreter with it costs more than rendering them.
        """
        name, variables = self._call(
            messages, add_generation_prompt, continue_final_message, tools, template_kwargs or {}
        )
        reply = self._run_plain(name, variables)
        if reply is None:
            encoded = _to_json(variables)
            process = self._borrow_idle(name) if len(encoded) <= MAX_INLINE_WRITE_BYTES else None
            reply = await self._run_async(process, name, encoded) if process is not None else None
        return _text_of(reply, continue_final_message) if reply is not None else None

    def source(self, *, has_tools: bool) -> str:
        """Return the Jinja source for requests with or without tools; "" if the model has no template."""
        return self._templates.get(_TOOLS if has_tools and _TOOLS in self._templates else _CHAT, "")

    def mentions(self, variable: str) -> bool:
        """Whether a template of the model contains the variable's name. If none does, none reads the variable."""
        return any(re.search(rf"\b{re.escape(variable)}\b", source) for source in self._templates.values())

    def _call(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
    ) -> tuple[str, dict[str, Any]]:
        """Return the template's name and its variables."""
        name = _TOOLS if tools and _TOOLS in self._templates else _CHAT
        if name not in self._templates:
            raise PagemillError(
                "The model has no chat template. Use /v1/completions, or set the deployment's `model.chatTemplate`.",
                param="messages",
                code="no_chat_template",
            )
        conversation = normalize_messages(messages)
        if continue_final_message:
            conversation[-1] = {**conversation[-1], "content": conversation[-1]["content"] + _CONTINUE_MARK}
        variables = {
            **self._constants,
            **check_template_kwargs(template_kwargs),
            "messages": conversation,
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        return name, variables

    def prepare(self) -> None:
        """Read the templates now, so that no client waits for it.

        If all are plain programs, the worker is ended: chats that still need it are rare, and it uses as much memory as
        a small program.
        """
        if not self._templates:
            return
        with contextlib.suppress(TimeLimitReached, WorkerDied):  # the first chat fails in the same way and is refused
            process = self._borrow()
            self._idle.append(process)
            if self._plain.keys() >= self._templates.keys():
                self.close()

    def close(self) -> None:
        """End idle workers. A later render starts new ones."""
        _close_all(self._idle)

    def _run_plain(self, name: str, variables: dict[str, Any]) -> dict[str, Any] | None:
        plain = self._plain.get(name)
        text = plain.render(variables) if plain is not None else None
        return {"text": text} if text is not None else None

    def _run(self, name: str, variables: bytes) -> dict[str, Any]:
        wait_s = self._limits.wall_limit_s
        if not self._slots.acquire(timeout=wait_s):
            raise unavailable(f"No chat could be rendered within {wait_s:g} s. Retry later.")
        try:
            return self._exchange(name, variables)
        finally:
            self._slots.release()

    async def _run_async(self, process: LimitedProcess, name: str, variables: bytes) -> dict[str, Any] | None:
        """Render in a process of `_borrow_idle`, which is returned afterwards. None: the process was killed, before or
        now."""

        def on_free() -> None:
            self._idle.append(process)
            self._slots.release()

        answered = process.call_inline(name, variables, on_free, self._slots.release)
        try:
            return await answered
        except ExchangeError as broken:
            verdict = await asyncio.to_thread(process.verdict, broken.cause)
        except asyncio.CancelledError:
            if not answered.cancelled() and answered.done() and answered.exception() is not None:
                answered.get_loop().run_in_executor(None, process.close)
            raise
        if isinstance(verdict, TimeLimitReached):
            raise self._too_slow()
        return None

    def _borrow_idle(self, name: str) -> LimitedProcess | None:
        """Return a process that can begin at once, or None."""
        if not self._slots.acquire(blocking=False):
            return None
        try:
            process = self._idle.pop()
        except IndexError:
            self._slots.release()
            return None
        if name in process.errors:
            self._idle.append(process)
            self._slots.release()
            return None
        return process

    def _exchange(self, name: str, variables: bytes) -> dict[str, Any]:
        """Render in a process. The first death is retried, since a worker may have been killed while it was idle."""
        for attempt in (1, 2):
            try:
                process = self._borrow()
                if name in process.errors:
                    self._idle.append(process)
                    raise _template_failed(f"it does not compile: {process.errors[name]}")
                reply = process.call(name, variables)
            except TimeLimitReached:
                raise self._too_slow() from None
            except WorkerDied as death:
                if attempt == 2:
                    raise _template_failed(f"its process ended ({death})") from None
                continue
            self._idle.append(process)
            return reply
        raise AssertionError("unreachable")

    def _too_slow(self) -> PagemillError:
        return _template_failed(f"it runs longer than {self._limits.cpu_limit_s:g} s")

    def _borrow(self) -> LimitedProcess:
        try:
            return self._idle.pop()
        except IndexError:
            process = LimitedProcess(self._templates, self._limits)
            for name, program in process.plain.items():
                if name not in self._plain:
                    with contextlib.suppress(ValueError):
                        self._plain[name] = PlainTemplate(program, self._limits.max_output_chars)
            return process

    def _check_compiles(self) -> None:
        try:
            process = self._borrow()
        except (TimeLimitReached, WorkerDied):
            raise _bad_override("takes too long or too much memory to compile") from None
        self._idle.append(process)
        if _CHAT in process.errors:
            raise _bad_override(f"is not a valid Jinja template: {process.errors[_CHAT]}")


def _sources(bundle: TokenizerBundle, override: str | None) -> dict[str, str]:
    if override is not None:
        return {_CHAT: override}
    sources = {_CHAT: bundle.chat_template, _TOOLS: bundle.tool_chat_template}
    return {name: source for name, source in sources.items() if source is not None}


def _close_all(processes: deque[LimitedProcess]) -> None:
    while processes:
        processes.pop().close()


def _to_json(variables: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(variables)
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid_field("messages", f"The messages are not valid JSON data: {str(error)[:200]}") from None


def _text_of(reply: dict[str, Any], continue_final_message: bool) -> str:
    if "text" in reply:
        text = str(reply["text"])
        return _cut_at_mark(text) if continue_final_message else text
    if "refusal" in reply:
        message = f"The chat template refuses these messages: {reply['refusal']}"
        raise invalid_field("messages", message, code=TEMPLATE_ERROR)
    raise _template_failed(reply["error"])


def _cut_at_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_CONTINUE_MARK)
    if not mark:
        raise invalid_field(
            "continue_final_message", "The chat template drops or changes the final message: it cannot be continued."
        )
    return before


def _template_failed(reason: str) -> PagemillError:
    return invalid_field(
        "messages",
        f"The model's chat template failed on these messages: {reason.rstrip('.')}.",
        code=TEMPLATE_ERROR,
    )


def _bad_override(problem: str) -> SourceError:
    return SourceError("model.chatTemplate", f"the chat template {problem}. Correct it.", reason="InvalidChatTemplate")
