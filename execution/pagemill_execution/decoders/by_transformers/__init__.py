"""Runs decoders without a declared family by their classes in `transformers`, over the paged cache."""
