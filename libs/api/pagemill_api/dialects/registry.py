"""The dialects of this server by name: one line each, and those that installed packages add.

A package adds a dialect with an entry point in the group `pagemill.dialects` whose object makes a subclass of
`base.Dialect`.
Engines and gateways build their routes from this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points

from pagemill_api.dialects.anthropic.messages import MessagesDialect
from pagemill_api.dialects.base import Dialect, Factory
from pagemill_api.dialects.chat_completions.chat import ChatDialect
from pagemill_api.dialects.chat_completions.completions import CompletionsDialect
from pagemill_api.dialects.ollama import ollama
from pagemill_api.dialects.ollama.ollama import OllamaChatDialect, OllamaGenerateDialect
from pagemill_api.dialects.open_inference import kserve
from pagemill_api.dialects.open_inference.kserve import KserveGenerateDialect, KserveInferDialect
from pagemill_api.dialects.openai_responses.compaction import CompactDialect
from pagemill_api.dialects.openai_responses.responses import ResponsesDialect
from pagemill_api.dialects.pages import Page
from pagemill_api.dialects.text_generation import tgi
from pagemill_api.dialects.text_generation.tgi import TgiDialect
from pagemill_api.dialects.vectors.embeddings import EmbeddingsDialect
from pagemill_api.dialects.vectors.rerank import RerankDialect
from pagemill_api.dialects.vectors.score import ScoreDialect
from pagemill_protocol.errors import invalid_field

GROUP = "pagemill.dialects"
PAGES: tuple[Page, ...] = (tgi.INFO, *ollama.PAGES, *kserve.PAGES)
LIVE_PATHS: tuple[str, ...] = (kserve.LIVE_PATH,)
READY_PATHS: tuple[str, ...] = (kserve.READY_PATH,)
"""Further paths of the probes."""
BUILT_IN: tuple[Factory, ...] = (
    ChatDialect,
    CompletionsDialect,
    MessagesDialect,
    ResponsesDialect,
    CompactDialect,
    EmbeddingsDialect,
    RerankDialect,
    ScoreDialect,
    TgiDialect,
    OllamaChatDialect,
    OllamaGenerateDialect,
    KserveGenerateDialect,
    KserveInferDialect,
)


@cache
def dialects() -> Mapping[str, Dialect]:
    """Return all dialects by name. Raises `ValueError` for one that is none, or if two have the same name."""
    found: dict[str, Dialect] = {}
    for factory in (*BUILT_IN, *(entry.load() for entry in entry_points(group=GROUP))):
        dialect = factory()
        if not isinstance(dialect, Dialect):
            raise ValueError(f"{dialect!r} is no dialect: derive its class from pagemill_api.dialects.base.Dialect")
        if dialect.name in found:
            raise ValueError(f"two dialects have the name {dialect.name!r}: remove one")
        found[dialect.name] = dialect
    return found


@cache
def generating_routes() -> Mapping[str, Dialect]:
    """Return all dialects by path. Raises `ValueError` if two have the same path."""
    found: dict[str, Dialect] = {}
    for dialect in dialects().values():
        for path in (dialect.path, *dialect.alias_paths):
            if path in found:
                raise ValueError(f"two dialects have the path {path!r}: remove one")
            found[path] = dialect
    return found


def dialect_of(name: str) -> Dialect:
    """Return the dialect of a `GenerateRequest`. Raises `PagemillError` 400 for one that is not installed here."""
    known = dialects()
    if name not in known:
        raise invalid_field(
            "dialect",
            f"This engine does not speak the dialect {name[:40]!r}; it speaks {', '.join(known)}. Install the same "
            "dialects on gateways and engines.",
        )
    return known[name]
