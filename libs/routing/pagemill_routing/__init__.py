"""Routing: which engine gets a request, when it waits, and what a failed attempt means. No HTTP, no torch."""
