"""Root mean square normalisation (arXiv 1910.07467), y = x / sqrt(mean(x^2) + eps) * weight, and layer norm."""
