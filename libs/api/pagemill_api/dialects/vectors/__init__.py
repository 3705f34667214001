"""Routes of models that pool: embeddings, scores of pairs, and documents ranked by scores."""
