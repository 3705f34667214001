"""What the Triton launchers share; the kernels themselves lie in the operations' folders.

`triton_body.py` beside an operation holds its kernels and nothing else (here: what several of them call),
`triton_launch.py` checks tensors, chooses tile sizes and launches. Both run on an NVIDIA device, or, with
TRITON_INTERPRET=1, on any CPU in Triton's interpreter.
"""
