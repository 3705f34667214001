"""Runs decoders that no family declares with their classes of the installed `transformers`, over the paged cache."""
