"""Anthropic's Messages API: parsed bodies and rendered answers. `messages` makes a dialect of them."""
