"""Who may enter, and how often one request may be tried. No torch, no aiohttp."""
