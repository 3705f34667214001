"""From a model's files to its declaration and sizes, without its weights."""
