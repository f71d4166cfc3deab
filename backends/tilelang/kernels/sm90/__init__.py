"""What Hopper GPUs alone run: thread-level twins of the tile-level kernels."""
