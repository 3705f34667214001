"""The engine: scheduler, paged KV cache, runners, models, servers."""

from pagemill_engine.settings import tune_libraries

tune_libraries()
