"""The in-memory cache, and the context manager that puts a cache before all others."""

from tilewright.ops.config.context import overlay_cache as overlay_cache
from tilewright.ops.config.memory import ConfigCache as ConfigCache
