"""The ops that move rows, one a module."""
