"""Commands in this process, and as programs of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewright.cli import main
from tilewright.cli.app import app

ROOT = Path(__file__).parents[2]


def invoke(*arguments, code=0, **options):
    """All that a command prints."""
    return streams(*arguments, code=code, **options).output


def streams(*arguments, code=0, **options):
    """What a command prints on each of its streams."""
    result = CliRunner().invoke(app, arguments, **options)
    assert result.exit_code == code, result.output + str(result.exception)
    return result


def ends(capsys, *arguments):
    """Exit code, stdout and the one line on stderr of a command that fails."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    captured = capsys.readouterr()
    assert len(captured.err.strip().splitlines()) == 1, captured.err
    assert captured.err.startswith("tilewright: ")
    return ended.value.code, captured.out, captured.err


def program(*arguments: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    """The command that is a program with these arguments and heeds an interrupt, and its environment."""
    # A shell without job control has what runs in its background ignore the signal, and children inherit that.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heed}; from tilewright.cli import main; main()", *arguments]
    return command, {**os.environ, "PYTHONPATH": str(ROOT), **environment}


def interrupted(
    process: subprocess.Popen[str], ready: Callable[[], bool], number: int = signal.SIGINT
) -> tuple[str, str]:
    """What a program prints that is sent a signal once it is ready: it must end with 130 and say why."""
    try:
        end = time.monotonic() + 200
        while not ready():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(number)
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    return output, errors


def one_device() -> str:
    """The ``XLA_FLAGS`` of this process except the number of devices: for programs that a user starts."""
    return " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
