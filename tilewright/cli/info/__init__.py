"""The work of ``tilewright info``: facts of the machine, and the state of each backend."""
