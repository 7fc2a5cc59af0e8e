"""Compiles Mosaic GPU kernels while their program is still being lowered, and only once per machine.

XLA compiles such kernels when it compiles a program, one after another, except those whose code hash the process
already knows. Here each kernel is compiled earlier, as a program of its own in a thread of its own, which makes its
hash known to the process. The executable is kept on disk: a later process loads it instead of compiling the kernel.
"""

import concurrent.futures
import hashlib
import logging
import os
import threading
from typing import Any

import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax.interpreters import mlir

from tilewright.ops.lowering import mlir_modules
from tilewright.ops.lowering.lowered_files import LoweredFiles
from tilewright.ops.lowering.program_key import is_kept_on_disk
from tilewright.ops.utils.fingerprint import device_fingerprint, toolchain_fingerprint
from tilewright.ops.utils.processes import usable_cores
from tilewright.ops.utils.target import active_target

logger = logging.getLogger(__name__)

TARGETS = frozenset({"mosaic_gpu_v2"})
"""Custom calls whose kernels a process compiles once, whichever programs contain them."""

_SCHEMA = 1
# These programs contain nothing else that XLA could tune.
_OPTIONS = {"xla_gpu_autotune_level": 0}
_NOT_AHEAD = "a kernel was not compiled ahead of its program: %s"

Done = concurrent.futures.Future[None]


class CompiledKernels:
    """The kernels that a process has compiled, is compiling, or has loaded; safe to use from any number of threads.

    Args:
      files: the executables on disk.
      at_once: number of kernels compiled at the same time; by default half the number of cores.

    Attributes:
      loaded: the number of kernels loaded from disk.
      compiled: the number of kernels compiled.
    """

    def __init__(self, files: LoweredFiles, at_once: int | None = None) -> None:
        self._files = files
        self._slots = threading.BoundedSemaphore(at_once or max(1, usable_cores() // 2))
        self._lock = threading.Lock()
        self._by_digest: dict[str, Done] = {}
        self._thread_state = threading.local()
        self.loaded = 0
        self.compiled = 0

    def begin(self, client: xla_client.Client, module: ir.Module) -> None:
        """Loads the kernels of a module, and starts compiling those that are not on disk.

        A failure is left to the compilation of the program, which reports it.

        Args:
          client: XLA's client for the program's devices.
          module: the program in StableHLO.
        """
        for code in mlir_modules.extract_calls(module, TARGETS):
            digest = hashlib.sha256(code).hexdigest()
            with self._lock:
                known = self._by_digest.get(digest)
                done = self._by_digest.setdefault(digest, Done())
            self._pending().append(done)
            if known is None:
                self._load_or_begin(client, digest, code, done)

    def wait(self) -> None:
        """Waits for the kernels that this thread started, and for those it needs that another thread started."""
        pending = self._pending()
        concurrent.futures.wait(pending)
        pending.clear()

    def _pending(self) -> list[Done]:
        pending: list[Done] = [done for done in getattr(self._thread_state, "pending", []) if not done.done()]
        self._thread_state.pending = pending
        return pending

    def _load_or_begin(self, client: xla_client.Client, digest: str, code: bytes, done: Done) -> None:
        begun = False
        try:
            key = _key(client, digest) if is_kept_on_disk() else None
            if key is None or not self._load(client, key):
                # A thread each instead of a pool: a forked process has none of its parent's threads.
                work = threading.Thread(target=self._compile, args=(client, key, code, done), name="tilewright-compile")
                work.start()
                begun = True
        except Exception as error:  # for example if no more threads can be started
            logger.info(_NOT_AHEAD, error)
        finally:
            if not begun:
                done.set_result(None)

    def _load(self, client: xla_client.Client, key: dict[str, Any]) -> bool:
        file = self._files.get(key)
        if file is None:
            return False
        try:
            client.deserialize_executable(file.content, *_devices_and_options(client))
        except Exception as error:  # XLA raises many types
            logger.warning("a compiled kernel on disk is not used: %s", error)
            return False
        with self._lock:
            self.loaded += 1
        return True

    def _compile(self, client: xla_client.Client, key: dict[str, Any] | None, code: bytes, done: Done) -> None:
        try:
            with self._slots, jax_mlir.make_ir_context(), ir.Location.unknown():
                executable = client.compile_and_load(ir.Module.parse(code), *_devices_and_options(client))
            with self._lock:
                self.compiled += 1
            if key is not None:
                self._files.put(key, {}, client.serialize_executable(executable))
        except Exception as error:  # XLA raises many types
            logger.info(_NOT_AHEAD, error)
        finally:
            done.set_result(None)


def _key(client: xla_client.Client, digest: str) -> dict[str, Any]:
    """Everything that an executable depends on, as JSON data."""
    return {
        "schema": _SCHEMA,
        "op": "compiled",
        "stage": digest[:16],
        "platform": client.platform,
        "code": digest,
        "compiler": client.platform_version,
        "device": device_fingerprint(client.local_devices()[0]),
        "toolchain": toolchain_fingerprint(),
        "flags": os.environ.get("XLA_FLAGS", ""),
    }


def _devices_and_options(client: xla_client.Client) -> tuple[xla_client.DeviceList, xla_client.CompileOptions]:
    """One device of this process, and XLA's options for compiling a program for it."""
    device = client.local_devices()[0]
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=1,
        device_assignment=np.array([[device.id]]),
        env_options_overrides=dict(_OPTIONS),
        backend=client,
    )
    return xla_client.DeviceList((device,)), options


KERNELS = CompiledKernels(LoweredFiles())


def begin(ctx: mlir.LoweringRuleContext, module: ir.Module) -> None:
    """Starts compiling the kernels of a lowered module that will become part of a program.

    Does nothing for a program that will not run in this process.

    Args:
      ctx: the context of the lowering rule.
    """
    module_ctx = ctx.module_context
    if module_ctx.lowering_parameters.for_export or active_target() is not None:
        return
    if not TARGETS & set(mlir_modules.custom_calls(module)):
        return
    try:
        client = module_ctx.get_backend(optional=True)
    except RuntimeError:  # there is no such device
        return
    if isinstance(client, xla_client.Client) and client.local_devices():
        KERNELS.begin(client, module)


def wait() -> None:
    """Waits for the kernels of the programs that this thread has lowered."""
    KERNELS.wait()
