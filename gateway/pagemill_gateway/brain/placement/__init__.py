"""Where a request goes: which endpoints may take it, what it would find there, the choice and its record."""
