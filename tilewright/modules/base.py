"""The configuration that all ops share, and the platform that an op runs on: see ``tilewright.compat``."""

from tilewright.compat.base import Backend as Backend
from tilewright.compat.base import KernelConfig as KernelConfig
from tilewright.compat.base import Platform as Platform
from tilewright.compat.base import create_default_executor as create_default_executor
from tilewright.compat.base import detect_platform as detect_platform
