"""The gateway's HTTP routes: the OpenAI routes on the data port, and the catalogue and status on the control port."""
