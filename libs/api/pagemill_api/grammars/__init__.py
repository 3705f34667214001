"""Forms of answers as grammars: written for llguidance, and checked before an engine compiles them. No torch."""
