"""Secrets that processes read from files and notice when they change."""
