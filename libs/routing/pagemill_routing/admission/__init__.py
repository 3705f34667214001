"""When a request waits, and what capacity it reserves of an engine. Pure bookkeeping."""
