"""The OpenAI dialects (chat completions, completions) and vLLM's tokenize pair, shared by engine and gateway.

`parse` turns raw bytes into the bounded types of `schemas`, `prepare` turns those into `GenerateRequest`s with token
ids, `render` writes the answers. Nothing here opens a socket or samples a token.
"""
