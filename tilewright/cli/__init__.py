"""The ``tilewright`` command; nothing here is loaded by ``import tilewright``."""

from tilewright.cli.app import main

__all__ = ["main"]
