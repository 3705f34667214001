"""What is decided before anything is loaded: how the model is computed, memory, cache and limits of a step.

The planner reads it too: nothing here loads weights or executes a step.
"""
