"""Stands in for flash-linear-attention 0.5: its published dispatch, and operators that say who they are."""
