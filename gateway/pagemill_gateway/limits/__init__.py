"""What one caller may have: its identity for now, from its API key."""
