"""The functions over the core of paged attention, one file each."""
