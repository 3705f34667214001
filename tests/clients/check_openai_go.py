# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# go = "github.com/openai/openai-go/v3@v3.99.0"
# ///
"""OpenAI's client for Go, in a program that is built here; it needs Go 1.26, and is not among those that CI runs."""

from __future__ import annotations

from built_program import report

report()
