"""The work of ``tilewright info``: the machine, and each backend's reasons on it."""
