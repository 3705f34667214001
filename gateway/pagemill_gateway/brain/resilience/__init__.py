"""What follows from failures: who is ejected, who may try again, and which request is the cause."""
