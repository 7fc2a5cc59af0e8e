"""Commands in this process."""

import os

from typer.testing import CliRunner

from tilewright.cli.app import app


def invoke(*arguments, code=0, **options):
    result = CliRunner().invoke(app, arguments, **options)
    assert result.exit_code == code, result.output
    return result.output


def one_device() -> str:
    """The ``XLA_FLAGS`` of this process except the number of devices: for programs that a user starts."""
    return " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
