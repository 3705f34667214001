"""Helpers of the Triton launchers; the kernels themselves are in the operations' packages.

`triton_body.py` of an operation contains its kernels and nothing else (here: functions that several of them call);
`triton_launch.py` checks tensors, chooses tile sizes and launches. Both run on an NVIDIA device, or, with
TRITON_INTERPRET=1, on any CPU in Triton's interpreter.
"""
