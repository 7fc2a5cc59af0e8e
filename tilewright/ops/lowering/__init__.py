"""Lowering: the primitive of a call, its derivatives, and the programs that kernels are lowered to."""
