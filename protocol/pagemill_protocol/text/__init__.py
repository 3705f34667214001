"""Text in and out of a model: tokenizer bundle, chat template, incremental detokenization. No torch."""
