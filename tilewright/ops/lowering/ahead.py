"""Kernels of Mosaic GPU are compiled while the program that holds them is being lowered, and once on a machine.

XLA has such kernels compiled when it compiles a program, one after another, except those that the process knows by the
hash of their code. Here each is compiled before that, as a program of its own and in a thread of its own, whereby the
process knows it. The executable is kept on disk: a later process loads it, and compiles no kernel.
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
from tilewright.ops.utils.target import target_in_force

logger = logging.getLogger(__name__)

TARGETS = frozenset({"mosaic_gpu_v2"})
"""Custom calls whose kernels a process compiles once, whatever programs hold them."""

_SCHEMA = 1
# There is nothing else in these programs that XLA could choose by measuring.
_OPTIONS = {"xla_gpu_autotune_level": 0}
_NOT_AHEAD = "a kernel was not compiled ahead of its program: %s"

Done = concurrent.futures.Future[None]


class CompiledKernels:
    """The kernels that a process has compiled, is compiling, or has loaded; any number of threads may use it.

    Args:
      files: where executables are kept.
      at_once: how many are compiled at the same time; by default as many as half the cores.

    Attributes:
      loaded: how many came from the disk.
      compiled: how many were compiled.
    """

    def __init__(self, files: LoweredFiles, at_once: int | None = None) -> None:
        self._files = files
        self._turns = threading.BoundedSemaphore(at_once or max(1, usable_cores() // 2))
        self._lock = threading.Lock()
        self._known: dict[str, Done] = {}
        self._asked = threading.local()
        self.loaded = 0
        self.compiled = 0

    def begin(self, client: xla_client.Client, module: ir.Module) -> None:
        """Loads the kernels of a module, and begins to compile those that are not on disk.

        What fails is left to the compilation of the program, which says why.

        Args:
          client: XLA's, of the devices that the program is for.
          module: MLIR's, in StableHLO.
        """
        for code in mlir_modules.calls_apart(module, TARGETS):
            digest = hashlib.sha256(code).hexdigest()
            with self._lock:
                known = self._known.get(digest)
                done = self._known.setdefault(digest, Done())
            self._pending().append(done)
            if known is None:
                self._load_or_begin(client, digest, code, done)

    def wait(self) -> None:
        """Waits for what this thread began, or asked for while another was at it."""
        pending = self._pending()
        concurrent.futures.wait(pending)
        pending.clear()

    def _pending(self) -> list[Done]:
        pending: list[Done] = [done for done in getattr(self._asked, "pending", []) if not done.done()]
        self._asked.pending = pending
        return pending

    def _load_or_begin(self, client: xla_client.Client, digest: str, code: bytes, done: Done) -> None:
        begun = False
        try:
            key = _key(client, digest) if is_kept_on_disk() else None
            if key is None or not self._load(client, key):
                # A thread each, and no pool: a process that was forked has none of its parent's threads.
                work = threading.Thread(target=self._compile, args=(client, key, code, done), name="tilewright-compile")
                work.start()
                begun = True
        except Exception as error:  # as when there may be no more threads
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
        except Exception as error:  # XLA's, of many types
            logger.warning("a compiled kernel on disk is not used: %s", error)
            return False
        with self._lock:
            self.loaded += 1
        return True

    def _compile(self, client: xla_client.Client, key: dict[str, Any] | None, code: bytes, done: Done) -> None:
        try:
            with self._turns, jax_mlir.make_ir_context(), ir.Location.unknown():
                executable = client.compile_and_load(ir.Module.parse(code), *_devices_and_options(client))
            with self._lock:
                self.compiled += 1
            if key is not None:
                self._files.put(key, {}, client.serialize_executable(executable))
        except Exception as error:  # XLA's, of many types
            logger.info(_NOT_AHEAD, error)
        finally:
            done.set_result(None)


def _key(client: xla_client.Client, digest: str) -> dict[str, Any]:
    """All that an executable depends on, as JSON data."""
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
    """One device of this process, and XLA's options for a program on it."""
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
    """Begins to compile the kernels of a lowered module that is to become part of a program.

    Nothing is done for a program that is not to run here.

    Args:
      ctx: of the lowering rule.
    """
    around = ctx.module_context
    if around.lowering_parameters.for_export or target_in_force() is not None:
        return
    if not TARGETS & set(mlir_modules.custom_calls(module)):
        return
    try:
        client = around.get_backend(optional=True)
    except RuntimeError:  # there is no such device
        return
    if isinstance(client, xla_client.Client) and client.local_devices():
        KERNELS.begin(client, module)


def wait() -> None:
    """Waits for the kernels of what this thread has lowered."""
    KERNELS.wait()
