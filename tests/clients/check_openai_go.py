# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# go = "github.com/openai/openai-go/v3@v3.99.0"
# ///
"""OpenAI's client for Go, in a program that is built here; it needs Go 1.26, and is not among those that CI runs."""

from __future__ import annotations

from built_program import run
from checks import check, report_all


@check("models, all and one")
def models() -> None:
    run("models")


@check("chat")
def chat() -> None:
    run("chat")


@check("chat, streamed with usage")
def stream() -> None:
    run("stream")


@check("a tool's call and its result")
def tools() -> None:
    run("tools")


@check("embeddings")
def embeddings() -> None:
    run("embeddings")


@check("errors by status, code and field")
def errors() -> None:
    run("errors")


report_all()
