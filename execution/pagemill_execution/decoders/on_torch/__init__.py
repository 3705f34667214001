"""Runs a declaration with torch and the operations of `pagemill_kernels`: modules built from the declared parts."""
