"""What one of several ranks holds of a model: every linear layer by number and role, and smaller declarations.

All of it is derived from a family's declaration, so that a family adds nothing. Nothing here reads weights; the
engine's `decoders` run a smaller declaration as they run a whole one.
"""
