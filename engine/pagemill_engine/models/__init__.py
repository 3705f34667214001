"""Model definitions: what is computed, built from shared blocks in Hugging Face naming.

Each architecture is one file; `registry` maps a checkpoint's architecture string to it. Models own their weights and
know neither files (`loading`), nor requests (`scheduler`), nor devices (`pagemill_kernels` does).
"""
