"""What the tests of tools share."""

from tests.support.caches import cache_directory as cache_directory
from tests.support.fake_nvcc import nvcc as nvcc
