"""What a model's files say about its text: tokenizer, chat template, defaults of generation."""
