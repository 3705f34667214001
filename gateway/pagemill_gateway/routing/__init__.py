"""Which endpoint answers soonest: pure policies over candidates. No torch, no aiohttp, no clock of its own."""
