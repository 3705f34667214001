"""What clients say, and how it becomes tokens and text again: dialects, schemas, answers, grammars, tokenizer. No torch."""
