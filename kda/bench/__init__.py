"""Benchmark: how fast a backend runs the production form, against what the machine can do (`python -m kda bench`)."""
