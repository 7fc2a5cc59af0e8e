"""Python processes that this one starts."""

import os
import sys


def module_path() -> str:
    """The ``PYTHONPATH`` with which another Python finds the modules that this one finds."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)
