"""The sizes of the examples' model in tests: as small as they may be with every part of it in use."""

import byte_transformer as bt

MODEL = bt.ModelConfig(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, hidden=48, window=6, ngram_buckets=64)
