"""JAX kernels that choose their own configuration, correctly."""

from tilewright import errors as errors
from tilewright import modules as modules
from tilewright import ops as ops
from tilewright._version import __version__ as __version__
from tilewright.errors import NoConfigError as NoConfigError
from tilewright.errors import UnsupportedError as UnsupportedError
from tilewright.ops import tune as tune
