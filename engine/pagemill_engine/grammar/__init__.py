"""Holds answers to the form that their requests prescribe: grammars, compiled and cached, and their states."""
