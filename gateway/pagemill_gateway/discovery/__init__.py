"""The sources of the brain's data: the catalogue, the engines' state streams, and their tokenizer bundles."""
