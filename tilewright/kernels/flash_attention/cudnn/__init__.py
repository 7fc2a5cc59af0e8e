"""Flash attention by cuDNN."""
