"""OpenAI's Responses API: parsed bodies and rendered answers. `responses` makes a dialect of them."""
