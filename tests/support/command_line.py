"""Commands in this process."""

from typer.testing import CliRunner

from tilewright.cli.app import app


def invoke(*arguments, code=0, **options):
    result = CliRunner().invoke(app, arguments, **options)
    assert result.exit_code == code, result.output
    return result.output
