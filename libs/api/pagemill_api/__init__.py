"""What clients say, and how it becomes tokens and text again: dialects, answers, grammars, tokenizer. No torch."""
