"""The registry of dialects refuses what it cannot serve when a server starts, not at a request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagemill_api.dialects import registry
from pagemill_api.dialects.base import NO_REQUEST, AnswerRenderer, Dialect
from pagemill_api.dialects.chat_completions.chat import ChatDialect


class Shaped:
    """Has a name and a route, but does not derive from `Dialect`."""

    name = "shaped"
    path = "/v1/shaped"


class Unfinished(ChatDialect):
    """A renderer that lacks a method is found by mypy, and when it is made."""

    name = "unfinished"
    path = "/v1/unfinished"
    alias_paths = (ChatDialect.path,)


class Partial(Dialect):
    name = "partial"


def refused(monkeypatch: pytest.MonkeyPatch, factory: Callable[[], object]) -> str:
    monkeypatch.setattr(registry, "BUILT_IN", (ChatDialect, factory))
    for cached in (registry.dialects, registry.generating_routes):
        cached.cache_clear()
    try:
        with pytest.raises((ValueError, TypeError)) as found:
            registry.generating_routes()
    finally:
        for cached in (registry.dialects, registry.generating_routes):
            cached.cache_clear()
    return str(found.value)


def test_a_dialect_that_does_not_derive_from_the_base_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "derive its class from pagemill_api.dialects.base.Dialect" in refused(monkeypatch, Shaped)


def test_a_dialect_that_lacks_a_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "error_body" in refused(monkeypatch, Partial)  # type: ignore[type-abstract, arg-type]


def test_two_dialects_of_one_name_or_path_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "name 'chat'" in refused(monkeypatch, ChatDialect)
    assert "path '/v1/chat/completions'" in refused(monkeypatch, Unfinished)


def test_what_most_dialects_do_not_need_has_a_default() -> None:
    class Renderer(AnswerRenderer):
        resume = chunk = end = body = lambda *_: b""  # type: ignore[assignment]

    renderer = Renderer()
    assert (renderer.num_events, renderer.failure(ValueError()), renderer.collected_logprobs(of_prompt=False)) == (
        0,
        None,
        None,
    )
    assert ChatDialect.alias_paths == ()
    assert NO_REQUEST.only_model == ""
