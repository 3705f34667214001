"""Kernels of recurrent layers for steps of any size on GPUs; those for single tokens are in the folder above."""
