"""The engine: scheduler, paged KV cache, runners, models, servers."""
