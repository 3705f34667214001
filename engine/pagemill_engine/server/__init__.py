"""The engine's HTTP process, with a data port and a control port. Does not import torch."""
