"""What the commands' tests share."""

from tests.support.caches import cache_directory as cache_directory
