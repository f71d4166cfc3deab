"""Precision gates: one table of cases that every backend has to pass (`python -m kda gate`)."""
