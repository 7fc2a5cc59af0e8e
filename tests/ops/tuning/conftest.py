"""What the tests of tuning share."""

from tests.support.clock import clock as clock
from tests.support.fake_nvcc import nvcc as nvcc
