"""What devices that share a model send to each other."""
