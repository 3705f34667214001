"""Anthropic's Messages API: checked bodies and rendered answers. `dialects.messages` makes a dialect of them."""
