"""The kernels, in the order in which data flows: plan -> prepare -> carry, or chunk_delta_h -> chunk_o in its place.

prepare makes M1 to M3 of all chunks side by side, with one module a stage: activation, scores, inverse, wy. M4 is
carry, or chunk_delta_h and chunk_o where snapshots of the state are wanted. recurrent is fused_recurrent_kda, in one
kernel.
"""
