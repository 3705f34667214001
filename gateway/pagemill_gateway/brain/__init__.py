"""What the gateway knows of its engines, and who gets the next request. No HTTP in here."""
