"""Stands in for fla-core 0.6: its dispatch by the published interface, and operators that say who they are."""
