"""Exceptions of this package; a wrong argument is a plain ``ValueError`` or ``TypeError``."""

from collections.abc import Mapping, Sequence


class TilewrightError(Exception):
    """Base of every error that is not a mistake in an argument."""


class UnsupportedError(TilewrightError):
    """No backend can serve a call.

    ``reasons`` maps each backend that was asked, such as ``"xla"`` or ``"cuda:cutlass"``, to all of its reasons.
    """

    def __init__(self, op: str, reasons: Mapping[str, Sequence[str]]):
        self.op = op
        self.reasons = {backend: tuple(why) for backend, why in reasons.items()}
        lines = [f"  {backend}: {'; '.join(why)}" for backend, why in self.reasons.items()]
        super().__init__("\n".join([f"no backend of {op} can serve this call:", *lines]))

    def __reduce__(self):
        return type(self), (self.op, self.reasons)


class NoConfigError(TilewrightError):
    """The caches hold no config for a call, and the policy or a lock file forbids choosing one."""


class LockError(TilewrightError):
    """A lock file that was asked for is missing, damaged, altered, or of another schema."""


class AgreementError(TilewrightError):
    """The processes of a program cannot agree on the config of a call."""


class TargetDeviceError(TilewrightError, RuntimeError):
    """Code cannot run on, or be compiled for, the device of ``target_device`` on this machine."""


class BuildError(TilewrightError):
    """CUDA sources could not be compiled, or a compiled object may not be used.

    ``output`` is what the compiler printed; empty where it was not the compiler that failed.
    """

    def __init__(self, message: str, output: str = ""):
        self.message = message
        self.output = output
        super().__init__(f"{message}\n{output}".rstrip())

    def __reduce__(self):
        return type(self), (self.message, self.output)
