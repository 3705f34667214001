"""How the brain learns: the catalogue, the engines' state streams, their tokenizer bundles."""
