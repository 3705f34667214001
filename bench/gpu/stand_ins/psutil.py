"""Stands for psutil where it is not installed: `bench/gpu` asks the device for its memory, never the host."""

from __future__ import annotations
