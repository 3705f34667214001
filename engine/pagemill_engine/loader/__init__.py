"""The model loader: from its source onto a volume, once, before any engine starts. No torch."""
