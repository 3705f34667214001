# /// script
# dependencies = ["pydantic"]
# [tool.pagemill]
# rust = "async-openai@0.43.0"
# ///
"""A client for Rust, in a program that is built here; tried with Rust 1.95, and is not among those that CI runs."""

from __future__ import annotations

from built_program import report

report()
