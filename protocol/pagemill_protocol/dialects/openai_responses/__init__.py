"""OpenAI's Responses API: checked bodies and rendered answers. `dialects.responses` makes a dialect of them."""
