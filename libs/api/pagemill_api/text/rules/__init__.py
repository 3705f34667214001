"""Rules for the tokenizer of a model, whose file its publisher writes: known steps with bounded time and growth."""
