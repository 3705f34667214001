"""OpenAI's Batch API: runs files of requests with the engine capacity that live requests leave idle."""
