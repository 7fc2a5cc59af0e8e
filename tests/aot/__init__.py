"""Compilation for a GPU that is not there: in an environment of its own, by `make aot`."""
