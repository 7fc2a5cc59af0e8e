"""Vocabulary losses on Hopper: the matmul kernel with a softmax in its epilogue."""
