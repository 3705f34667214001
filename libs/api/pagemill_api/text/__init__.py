"""Text input and output of a model: tokenizer bundle, chat template, incremental detokenization. No torch."""
