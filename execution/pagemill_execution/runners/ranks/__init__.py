"""Several ranks that run one model's steps: rank 0 plans and samples, followers apply the same plans to their shards.

Nothing here is built for one rank. Groups and rings are `pagemill_kernels.ranks`', shards `pagemill_models.sharding`'s;
`starting.load_ranks` loads them.
"""
