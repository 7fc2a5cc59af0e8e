"""The cores this process may use, and the module path for Python processes that it starts."""

import os
import platform
import sys


def usable_cores() -> int:
    """The number of cores this process may run on."""
    if os.name == "posix" and platform.system() == "Linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def module_path() -> str:
    """The ``PYTHONPATH`` with which a child Python process finds the modules that this one finds."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)
