"""Where a request goes: who may take it, what it would find there, the choice and its record."""
