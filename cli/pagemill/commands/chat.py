"""`pagemill chat`: a conversation with a model in the terminal, or one question from a script.

It streams each answer and keeps the conversation; Ctrl-C stops an answer without leaving. It works with any
OpenAI-compatible server (see `pagemill.client`). The answer goes to standard output and everything else to standard
error, so that the output of one question can be piped.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import typer

from pagemill.client import ChatClient, ChatPiece, ClientError, first_model
from pagemill.printable import printable

DEFAULT_URL = "http://127.0.0.1:8080"
MAX_STDIN_CHARS = 4 * 1024 * 1024
HELP = "/reset starts a new conversation, /system TEXT sets the system message, /quit exits; Ctrl-C stops an answer."


@dataclass
class ChatConversation:
    """The system message and the turns so far."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns]

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add an answer, complete or interrupted. An empty answer removes its question."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def reset(self) -> None:
        self.turns.clear()


@dataclass
class ChatAnswer:
    """One streamed answer and its timing."""

    started_s: float = field(default_factory=time.perf_counter)
    text: str = ""
    first_s: float | None = None
    last_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None

    def add(self, piece: ChatPiece) -> None:
        self.text += piece.text
        self.finish_reason = piece.finish_reason or self.finish_reason
        if piece.text or piece.reasoning:
            self.first_s = self.first_s or piece.at_s
            self.last_s = piece.at_s
        if piece.completion_tokens is not None:
            self.prompt_tokens, self.completion_tokens = piece.prompt_tokens, piece.completion_tokens

    def usage_line(self) -> str:
        """Return a line such as `42 tokens, 31.2 tok/s, first token after 120 ms (prompt 18 tokens)`."""
        parts = []
        if self.completion_tokens is not None:
            parts.append(f"{self.completion_tokens} tokens")
            parts += self._rate(self.completion_tokens)
        if self.first_s is not None:
            parts.append(f"first token after {(self.first_s - self.started_s) * 1000:.0f} ms")
        if self.finish_reason == "length":
            parts.append("cut at max_tokens")
        prompt = f" (prompt {self.prompt_tokens} tokens)" if self.prompt_tokens is not None else ""
        return ", ".join(parts) + prompt

    def _rate(self, num_tokens: int) -> list[str]:
        if self.first_s is None or self.last_s is None or num_tokens < 2 or self.last_s <= self.first_s:
            return []
        return [f"{(num_tokens - 1) / (self.last_s - self.first_s):.1f} tok/s"]


def chat(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(help="Question to ask; the command exits after the answer (default: start a conversation)."),
    ] = None,
    url: Annotated[str, typer.Option(help="URL of the gateway or engine.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model to talk to (default: the first one served).")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens in an answer.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=2.0, help="Sampling temperature; 0 is greedy decoding.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="PAGEMILL_API_KEY", help="API key for the gateway (a bearer token).")
    ] = None,
) -> None:
    """Talk to a model: a conversation if PROMPT is missing and stdin is a terminal, otherwise one answer."""
    params = {"max_tokens": max_tokens, "temperature": temperature}
    session = ChatSession(
        url, api_key, model, ChatConversation(system), {k: v for k, v in params.items() if v is not None}
    )
    with asyncio.Runner() as runner:
        try:
            runner.run(session.open())
            if prompt or not sys.stdin.isatty():
                _ask_once(runner, session, " ".join(prompt) if prompt else _read_stdin())
            else:
                _converse(runner, session)
        except ClientError as error:
            _note(f"pagemill chat: {error}")
            raise typer.Exit(1) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(130) from interrupt
        finally:
            runner.run(session.close())


class ChatSession:
    """A client, the chosen model and the conversation; `say` is one turn."""

    def __init__(
        self, url: str, api_key: str | None, model: str | None, conversation: ChatConversation, params: dict[str, float]
    ) -> None:
        self.url = url
        self.conversation = conversation
        self.model = model or ""
        self._wanted = model
        self._api_key = api_key
        self._params = params
        self._client: ChatClient | None = None

    async def open(self) -> None:
        self._client = await ChatClient(self.url, api_key=self._api_key).__aenter__()
        self.model, names = await first_model(self._client, self._wanted)
        if len(names) > 1:
            _note(f"Using {self.model}; also served: {', '.join(names[1:])} (choose with --model).")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.__aexit__(None, None, None)

    async def say(self, answer: ChatAnswer, write: Callable[[str], None]) -> None:
        """Stream the answer to the conversation's last question: add it to `answer` and pass its text to `write`."""
        assert self._client is not None
        reasoned = False
        async for piece in self._client.stream_chat(self.model, self.conversation.messages(), **self._params):
            answer.add(piece)
            if piece.reasoning:
                write(piece.reasoning)
                reasoned = True
            if piece.text:
                write(("\n\n" if reasoned else "") + piece.text)
                reasoned = False


def _ask_once(runner: asyncio.Runner, session: ChatSession, question: str) -> None:
    if not question.strip():
        raise ClientError("There is no question: pass a PROMPT, or text on standard input.")
    session.conversation.ask(question)
    answer = ChatAnswer()
    try:
        runner.run(session.say(answer, _write))
    finally:
        if answer.text:
            _write("\n")
    _note(answer.usage_line())


def _converse(runner: asyncio.Runner, session: ChatSession) -> None:
    _note(f"Talking to {session.model} at {session.url}. {HELP}")
    while (line := _read_line()) is not None:
        if line.startswith("/"):
            if not _command(session.conversation, line):
                return
        elif line:
            _turn(runner, session, line)


def _turn(runner: asyncio.Runner, session: ChatSession, question: str) -> None:
    session.conversation.ask(question)
    answer = ChatAnswer()
    remark = ""
    try:
        runner.run(session.say(answer, _write))
    except KeyboardInterrupt:
        remark = "interrupted"
    except ClientError as error:
        remark = str(error)
    session.conversation.answer(answer.text)
    _write("\n" if answer.text else "")
    _note(remark or answer.usage_line())


def _command(conversation: ChatConversation, line: str) -> bool:
    """Run a line that begins with a slash. Return whether the conversation goes on."""
    name, _, rest = line.partition(" ")
    match name:
        case "/quit" | "/exit":
            return False
        case "/reset":
            conversation.reset()
            _note("Started a new conversation.")
        case "/system":
            conversation.system = rest.strip() or None
            _note("The system message is set." if conversation.system else "The system message is removed.")
        case "/help":
            _note(HELP)
        case _:
            _note(f"There is no command {name}. {HELP}")
    return True


def _read_line() -> str | None:
    """Return the next line that the user types, or `None` at the end of input. Ctrl-C clears the line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() editing and history where the platform has it

    while True:
        try:
            return input("> ").strip()
        except EOFError:
            _write("\n")
            return None
        except KeyboardInterrupt:
            _write("\n")
            _note("Type /quit or press Ctrl-D to leave.")


def _read_stdin() -> str:
    text = sys.stdin.read(MAX_STDIN_CHARS + 1)
    if len(text) > MAX_STDIN_CHARS:
        raise ClientError(f"Standard input is longer than {MAX_STDIN_CHARS} characters; send less text.")
    return text.strip()


def _write(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def _note(text: str) -> None:
    """Write a message that is not part of the answer to standard error."""
    if not text:
        return
    text = printable(text)
    dim = sys.stderr.isatty()
    sys.stderr.write(f"\033[2m{text}\033[0m\n" if dim else f"{text}\n")
    sys.stderr.flush()
