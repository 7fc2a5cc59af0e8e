"""What ``tilewright info`` does: the machine, and what each backend says of it."""
