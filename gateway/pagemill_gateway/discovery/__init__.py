"""Where the brain's knowledge comes from: the catalogue, the engines' state streams, their tokenizer bundles."""
