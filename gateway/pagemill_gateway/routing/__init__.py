"""Which endpoint a request goes to: pure policies over candidates. No torch, no aiohttp, no clock of its own."""
