"""OpenAI's Responses API: parsed bodies and rendered answers. `dialects.responses` makes a dialect of them."""
