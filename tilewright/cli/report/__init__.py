"""What ``tilewright report`` does: calls from files and the cache, and the page about them."""
