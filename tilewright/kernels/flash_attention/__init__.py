"""Flash attention: the op, its oracle, and its backends, one file or folder each."""
