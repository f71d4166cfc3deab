"""The kernels for Ascend NPUs: chunk and recurrent are the two operators', and chunk_stages hands out M1 to M4."""
