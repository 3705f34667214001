"""Execution: computes the plan of a step. Weights, decoders, samplers, runners, and how large they may be."""

from pagemill_execution.settings import tune_libraries

tune_libraries()
