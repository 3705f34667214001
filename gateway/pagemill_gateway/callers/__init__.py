"""Who calls: the entry of an API key, and what it allows. Plain values; nothing is counted here."""
