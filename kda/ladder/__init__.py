"""`python -m kda ladder`: the levels from linear attention to KDA, checked against each other, counted and timed."""
