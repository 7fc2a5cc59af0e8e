"""Losses over a vocabulary, whose logits ``x · weight`` are never in memory as a whole.

A backend computes statistics of each token's logits: lse, the label's logit, and with label smoothing their sum. From
these follow the loss with all its options, and the cotangents of the statistics, which are all that gradients need
beside the operands: they are the residuals that every backend makes and takes (``inputs.py``, ``losses.py``). Backends
compute within a block of tokens; the loops, and the matmuls of the gradients, are shared (``blocks``), and so is what
becomes of the statistics (``base.py``).

| function | a token's result | kernel |
| --- | --- | --- |
| ``linear_cross_entropy`` | cross-entropy, smoothing, z-loss | ``LinearCrossEntropy`` (``op.py``) |
| ``linear_log_probs`` | log-probability of the label | the same, reduction "none" |
| ``linear_kl_divergence`` | KL(teacher ‖ student) | ``LinearKlDivergence`` (``kl.py``) |

| a call | its gradients |
| --- | --- |
| reduction "mean" or "sum" | computed by the forward pass as those of the sum, and scaled; or recomputed: a config |
| reduction "none", ``return_lse`` | recomputed: each token has a cotangent of its own |
| tokens that XLA may split over devices, or split over explicit axes | recomputed |
| ``axis_name``: the vocabulary is split | recomputed from the statistics of all parts (``shards.py``) |
"""
