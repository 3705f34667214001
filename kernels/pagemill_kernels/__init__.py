"""One folder an operation: Triton body, launcher, torch reference."""
