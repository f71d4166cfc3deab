"""The backward pass, in the order in which data flows: carry (dM4, one chunk after another, the last first), then
prepare (dM3 to dM1 of all chunks side by side), with one module a stage: wy, scores, activation.

They read what the forward's prepare and chunk_delta_h leave, computed anew.
"""
