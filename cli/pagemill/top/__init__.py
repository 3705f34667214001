"""`pagemill top`: engines' metrics, from this machine or a cluster, as a table that follows them."""
