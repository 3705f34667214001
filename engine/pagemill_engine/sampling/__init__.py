"""Chooses tokens from logits, for a whole batch at once.

`rows` keeps what each request asked for as arrays, `sampler` is the order of the steps, `processors` change logits,
`filters` restrict the candidates, `randomness` specifies the noise, `logprobs` reports. When a choice ends is decided
elsewhere.
"""
