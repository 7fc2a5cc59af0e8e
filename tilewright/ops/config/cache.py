"""The cache in memory, and how one is put before all others."""

from tilewright.ops.config.context import overlay_cache as overlay_cache
from tilewright.ops.config.memory import ConfigCache as ConfigCache
