"""What the tests of tuning share."""

from tests.support.clock import clock as clock
