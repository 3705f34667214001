"""The engine: scheduler, blocks of the KV cache, loop, output, servers. `pagemill_execution` computes its steps."""
