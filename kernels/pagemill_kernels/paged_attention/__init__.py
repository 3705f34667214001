"""Attention of a step's tokens over the paged cache: prefill chunks and decodes of many requests in one call.

`plan_attention` is called once per step (and distinct sliding window) and decides how the batch is divided;
`paged_attention` is called once per layer and decides nothing. The cache layout is in `pagemill_kernels.kv_store`. The
keys and values of the step's own tokens must already be in the cache.
"""
