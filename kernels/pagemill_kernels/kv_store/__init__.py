"""Writes the keys and values of a step's tokens into the paged cache.

One layer's cache is [num_blocks, 2 * num_kv_heads, block_size, head_dim]: a block contains its key heads, then its
value heads, each head's tokens adjacent. Blocks are contiguous and may be any stride apart. So one copy moves a block,
one gather of (block, head) pairs gives contiguous keys and values per head, and the [keys | values] part of a fused
projection is stored with one indexed write. With latent attention a block has one head instead, of vectors that serve
as keys and values.
"""
