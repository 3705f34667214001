"""Anthropic's Messages API: parsed bodies and rendered answers. `dialects.messages` makes a dialect of them."""
