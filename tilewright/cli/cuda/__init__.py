"""The work of ``tilewright build``: finding the groups that are needed, and compiling them."""
