"""The loops that all backends of the vocabulary losses share: over blocks of tokens and of the vocabulary.

| module | has |
| --- | --- |
| ``tokens.py`` | the loop over blocks of tokens that are not ignored |
| ``vocabulary.py`` | the loop over blocks of the vocabulary; the sums of gradients that go through both loops |
| ``logits.py`` | what a backend computes within a block of tokens: statistics of logits, and gradients of them |
| ``kept.py`` | what GPU kernels keep of a block of tokens in place of its logits |
| ``backend.py`` | the forward and the backward pass of the cross-entropy of a backend's ``LogitKernels`` |

The matmuls that make the gradients of x and weight from that of the logits are XLA's.
"""
