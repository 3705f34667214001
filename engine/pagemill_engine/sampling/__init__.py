"""From logits to tokens: penalties, filters, seeded randomness, logprobs, for a whole batch at once."""
