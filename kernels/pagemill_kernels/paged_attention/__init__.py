"""Attention of a step's tokens over the paged cache: prefill chunks and decodes of many requests in one call.

`plan_attention` is called once a step (per distinct sliding window) and decides how the batch is cut;
`paged_attention` is called once a layer and decides nothing. Cache layout: `pagemill_kernels.kv_store`. The keys and
values of the step's own tokens must already be in the cache.
"""
