"""What the gateway knows of its engines, and which engine gets the next request. No HTTP in here."""
