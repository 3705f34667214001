"""The model loader: from a hub onto a volume, once, before any engine starts. No torch."""
