"""What a model is and where it comes from: families, spec, files, sources. No torch."""
