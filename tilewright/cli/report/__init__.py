"""The work of ``tilewright report``: calls from files and the cache, and the page about them."""
