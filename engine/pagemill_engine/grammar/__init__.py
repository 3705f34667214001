"""Structured output: compiles and caches grammars of forms, and keeps each sequence's state in them."""
