"""Bodies of Ollama's `POST /api/chat` and `/api/generate`, and their translation to chat requests.

Options about memory, threads and devices (`num_ctx`, `num_gpu`, ...) and `keep_alive` are ignored: the operator decides
on them. Calls have no ids in Ollama's messages: a result belongs to the first open call of its name, or to the first
open call.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, FiniteFloat

from pagemill_api.openai.fields import Name, RequestModel, StopList, Text, refusal
from pagemill_api.openai.schemas import MAX_MESSAGES
from pagemill_api.openai.tools import MAX_TOOLS, left_in_tool
from pagemill_api.openai.unsupported import TEXT_ONLY, Unsupported
from pagemill_protocol.request.sampling import MAX_STOP_STRINGS

LATEST = ":latest"
_LOGPROBS = "Send the request to /v1/chat/completions, which has them."
_SAMPLER = "Use `temperature`, `top_p` and `min_p`."


_OF_DEPLOYMENTS = (
    *("embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu"),
    *("num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"),
)


class Options(RequestModel):
    UNSUPPORTED: ClassVar = {
        "mirostat": Unsupported(_SAMPLER, (0,)),
        "tfs_z": Unsupported(_SAMPLER, (1, 1.0)),
        "typical_p": Unsupported(_SAMPLER, (1, 1.0)),
        "repeat_last_n": Unsupported("Penalties count all tokens: send -1.", (-1,)),
        "penalize_newline": Unsupported("Penalties count all tokens.", (True,)),
    }
    IGNORED: ClassVar = {
        **dict.fromkeys(_OF_DEPLOYMENTS, "the deployment defines context, memory and devices"),
        "num_keep": "contexts are not shifted",
        **dict.fromkeys(("mirostat_eta", "mirostat_tau"), "it belongs to `mirostat`, which is refused"),
    }

    num_predict: int | None = None
    """Below 0: the rest of the context."""
    temperature: FiniteFloat | None = None
    top_k: int | None = None
    top_p: FiniteFloat | None = None
    min_p: FiniteFloat | None = None
    seed: int | None = None
    stop: StopList = Field([], max_length=MAX_STOP_STRINGS)
    repeat_penalty: FiniteFloat | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None

    def for_chat(self) -> dict[str, Any]:
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
        limit = self.num_predict
        return {
            **{name: getattr(self, name) for name in names},
            "repetition_penalty": self.repeat_penalty,
            "max_tokens": limit if limit is None or limit >= 0 else None,
        }


class OllamaFunction(RequestModel):
    name: Name
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(RequestModel):
    id: Name | None = None
    function: OllamaFunction


class Message(RequestModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text | None = None
    images: list[Any] = Field(default_factory=list)
    tool_calls: list[OllamaCall] = Field(default_factory=list)
    tool_name: Name | None = None
    tool_call_id: Name | None = None

    def for_chat(self) -> dict[str, Any]:
        """Return the message without the fields of calls and results."""
        return {"role": self.role, "content": self.content} | (
            {} if self.thinking is None else {"reasoning_content": self.thinking}
        )


class OllamaRequest(RequestModel):
    """The fields of both routes."""

    UNSUPPORTED: ClassVar = {
        "logprobs": Unsupported(_LOGPROBS, (False,)),
        "top_logprobs": Unsupported(_LOGPROBS, (0,)),
        "truncate": Unsupported("Prompts are not cut silently; shorten the messages.", (False,)),
        "shift": Unsupported("Contexts are not shifted; an answer ends where its context does.", (False,)),
    }
    IGNORED: ClassVar = {"keep_alive": "models stay loaded; the deployment scales them"}

    model: Name
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = ""
    options: Options = Field(default_factory=lambda: Options.model_validate({}))
    think: bool | Literal["low", "medium", "high", "max"] | None = None

    def shared(self) -> dict[str, Any]:
        """Return the part of the chat request other than messages."""
        body = {
            "model": self.model.removesuffix(LATEST),
            "stream": self.stream,
            "response_format": self._response_format(),
            **self.options.for_chat(),
            **self._thinking(),
        }
        return {name: value for name, value in body.items() if value is not None}

    def _response_format(self) -> dict[str, Any] | None:
        if self.format == "json":
            return {"type": "json_object"}
        if isinstance(self.format, dict):
            form = {"name": "output", "schema": self.format, "strict": True}
            return {"type": "json_schema", "json_schema": form}
        return None

    def _thinking(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        thinks = self.think is not False
        return {
            "chat_template_kwargs": {"enable_thinking": thinks, "thinking": thinks},
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
        }


class OllamaChatRequest(OllamaRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: list[dict[str, Any]] = Field([], max_length=MAX_TOOLS)

    def for_chat(self) -> dict[str, Any]:
        """Return the body of the equivalent chat completion. Raises `PydanticCustomError` for refused content."""
        tools = [{"type": "function", **tool} for tool in self.tools]
        for tool in tools:
            left_in_tool(tool)
        return {**self.shared(), "messages": self._messages(), "tools": tools}

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        open_calls: list[tuple[str, str]] = []
        """Names and ids of calls without a result so far."""
        for index, message in enumerate(self.messages):
            refuse_images(message.images, f"messages[{index}].images")
            found = message.for_chat()
            if message.tool_calls:
                calls = [_call(call, f"call_{index}_{at}") for at, call in enumerate(message.tool_calls)]
                open_calls = [(call["function"]["name"], call["id"]) for call in calls]
                found["tool_calls"] = calls
            if message.role == "tool":
                found["tool_call_id"] = message.tool_call_id or _take(open_calls, message.tool_name)
            messages.append(found)
        return messages


class OllamaGenerateRequest(OllamaRequest):
    UNSUPPORTED: ClassVar = {
        **OllamaRequest.UNSUPPORTED,
        "template": Unsupported("Send a finished prompt with `raw: true`.", ("",)),
        "context": Unsupported("Send the conversation to /api/chat as `messages`.", ([],)),
        **dict.fromkeys(("width", "height", "steps"), Unsupported(TEXT_ONLY, (0,))),
    }

    prompt: Annotated[Text, Field(min_length=1)]
    suffix: Text = ""
    """The text after the answer: the prompt is then filled in the middle."""
    system: Text = ""
    raw: bool = False
    images: list[Any] = Field(default_factory=list)

    def for_chat(self) -> dict[str, Any]:
        """Return the body of the equivalent chat completion. Raises `PydanticCustomError` for refused content."""
        refuse_images(self.images, "images")
        if self.raw or self.suffix:
            self._refuse_with_finished_prompt()
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return {**self.shared(), "messages": messages, "add_special_tokens": self.raw or self.suffix != ""}

    def _refuse_with_finished_prompt(self) -> None:
        """Refuse what only a chat template puts into the prompt."""
        other = "raw" if self.raw else "suffix"
        for name, value in (("system", self.system), ("think", self.think)):
            if value:
                raise refusal(
                    name, f"With `{other}` no chat template is rendered, so `{name}` has no place. Remove it."
                )


def refuse_images(images: list[Any], field: str) -> None:
    if images:
        message = "Images are not supported: this server reads and writes text only. Remove them."
        raise refusal(f"{field}[0]", f"`{field}[0]` is an image. {message}", "unsupported_parameter")


def _call(call: OllamaCall, usual_id: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments, ensure_ascii=False)}
    return {"id": call.id or usual_id, "type": "function", "function": function}


def _take(open_calls: list[tuple[str, str]], name: str | None) -> str:
    """Return the id of the call that a result answers; "none", which the chat refuses, where no call is open."""
    at = next((at for at, (called, _) in enumerate(open_calls) if name in (None, called)), None)
    return "none" if at is None else open_calls.pop(at)[1]
