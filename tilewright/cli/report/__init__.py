"""The work of ``tilewright report``: collects calls from files and the cache, and renders a page about them."""
