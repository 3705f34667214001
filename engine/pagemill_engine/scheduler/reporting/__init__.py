"""What the scheduler says: the results of each step, and reports of its load."""
