"""LoRA adapters in an engine: `reading` their values, `packing` them for kernels, and the `store` that keeps them.

Slots of a step's rows are `runners.row_adapters`' part, requests that wait for an adapter
`pagemill_engine.loop.adapter_requests`'.
"""
