"""What ``tilewright build`` does: the groups that something needs, and their compilation."""
