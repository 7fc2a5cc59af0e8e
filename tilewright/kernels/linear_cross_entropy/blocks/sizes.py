"""Sizes of blocks of tokens and of the vocabulary on GPUs."""

WORKSPACE = 512 << 20
"""Bytes of what a block of tokens keeps of the whole vocabulary, or of the gradient of a block of both."""

MULTIPLE = 256
"""Classes that blocks of the vocabulary are multiples of: those of a kernel's tile."""

MIN_TOKENS = 128


def kept_tokens(tokens: int, vocab: int, itemsize: int) -> int:
    """Tokens of a block that keeps something of all classes."""
    size = max(WORKSPACE // (itemsize * max(vocab, 1)) // MIN_TOKENS, 1) * MIN_TOKENS
    # Blocks of one size: the last one takes as long with few tokens.
    return even_blocks(tokens, size, MIN_TOKENS)


def vocab_block(tokens: int, vocab: int, itemsize: int) -> int:
    """Classes of a block of so many tokens."""
    return even_blocks(vocab, max(MULTIPLE, WORKSPACE // (itemsize * max(tokens, 1))), MULTIPLE)


def even_blocks(size: int, limit: int, multiple: int) -> int:
    """A size of blocks up to a limit, such that the last block is about as large as the others."""
    count = max(-(-size // max(limit, 1)), 1)
    return max(min(size, -(-size // (multiple * count)) * multiple), 1)
