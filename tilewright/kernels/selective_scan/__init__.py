"""The selective scan of Mamba-1, over sequences and by one token of each."""
