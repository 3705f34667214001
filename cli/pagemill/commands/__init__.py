"""One module per command; each exposes one function named like the command, imported only when the command runs."""
