"""Reports of simulated fleets: a page with a table and plots, and the plots as pictures."""
