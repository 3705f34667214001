"""OpenAI's Batch API: files of requests that are run while the engines have capacity that live requests leave idle."""
