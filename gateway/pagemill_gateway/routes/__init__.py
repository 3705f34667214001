"""The gateway's HTTP faces: the OpenAI routes on the data port, health and catalogue on the control port."""
