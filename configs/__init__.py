"""Experiments: the only place where one is decided."""
