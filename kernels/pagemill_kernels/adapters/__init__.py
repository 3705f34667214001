"""Low-rank additions to the products of a step: for each row those of its own adapter, y += B (A x).

Base rows are not touched, so that their bits do not depend on who else is in the batch. Weights stay as they are: what
an adapter adds to a product is computed beside it, whatever the type of the packed matrix.
"""
