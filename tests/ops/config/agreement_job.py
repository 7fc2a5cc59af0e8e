"""One process of a job of several: python agreement_job.py INDEX COUNT PORT SCENARIO...; a line of JSON for each.

Each scenario has a kernel, a cache and an executor of its own.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.ops.config.test_agreement import Adds, Step
from tilewright.errors import AgreementError
from tilewright.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    Tuner,
    default_key_builder_with_sharding,
    overlay_cache,
    policy_override,
    use_lock,
)
from tilewright.ops.config import job_store, lockfile
from tilewright.ops.config.lockfile import Decision, Lock
from tilewright.ops.utils.fingerprint import device_fingerprint, toolchain_fingerprint

INDEX, COUNT, PORT, SCENARIOS = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]


class Measured(Adds):
    """With a config that process 1 cannot run, and a tuning that takes longer than others wait for an answer."""

    def config_space(self, inv):
        return [Step(0)]

    def config_reasons(self, inv, cfg):
        return ["it is too large for this process"] if cfg.size == 99 and INDEX == 1 else []

    def sample_inputs(self, inv, key):
        time.sleep(1.5)
        return super().sample_inputs(inv, key)


class Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record):
        self.found.append(record.getMessage())


class CountingClient:
    """JAX's client, counting what is asked of it."""

    def __init__(self, client):
        self._client, self.calls = client, 0

    def __getattr__(self, name):
        self.calls += 1
        return getattr(self._client, name)


def key_of(kernel, shape):
    return default_key_builder_with_sharding(kernel, (jnp.ones(shape),))


def main():
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{PORT}", COUNT, INDEX, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=5
    )
    for scenario in SCENARIOS:
        records = Records()
        logging.getLogger("tilewright").addHandler(records)
        print("JSON " + json.dumps(run(scenario, records)), flush=True)
        logging.getLogger("tilewright").removeHandler(records)
    done = job_store.distributed.global_state.client
    getattr(done, "_client", done).wait_at_barrier("tests-done", 30000)
    os._exit(0)


def run(scenario, records):
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    cache = ConfigCache()
    executor = Executor(ConfigSelectorChain(cache, policy=AutotunePolicy(allow_autotune=False), tuner=Tuner(0, 1)))
    out: dict[str, object] = {"scenario": scenario}

    def everywhere(kernel, size):
        """The config that the local part of a program of all processes ran with, and its sum over all of them."""
        sharding = NamedSharding(mesh, P("x"))
        local = np.zeros((jax.local_device_count(), size), np.float32)
        x = jax.make_array_from_process_local_data(sharding, local)

        def part(x):
            mine = executor(kernel, x)
            return mine, jax.lax.psum(mine, "x")

        mine, total = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=P("x"), out_specs=(P("x"), P())))(x)
        return float(mine.addressable_shards[0].data[0, 0]), float(total.addressable_shards[0].data[0, 0])

    def failing(kernel, size):
        began = time.monotonic()
        try:
            return everywhere(kernel, size)
        except AgreementError as error:
            return {"error": str(error), "seconds": time.monotonic() - began}

    def store(kernel, size, number):
        cache.put(key_of(kernel, (1, size)), Step(number))

    kernel = Measured(f"adds.{scenario}")
    if scenario == "choices":
        for size in (2, 3, 4, 5):
            store(kernel, size, 10 * size + INDEX)
        counting = job_store.distributed.global_state.client = CountingClient(job_store.distributed.global_state.client)
        order = (2, 3) if INDEX == 0 else (3, 2)  # only lowered, since collectives need an order
        lowered = {}
        for size in order:
            x = jax.ShapeDtypeStruct((2, size), jnp.float32, sharding=NamedSharding(mesh, P("x")))
            call = jax.shard_map(lambda x: executor(kernel, x), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
            lowered[size] = jax.jit(call).lower(x).as_text()
        out["texts"] = [hash_of(lowered[2]), hash_of(lowered[3])]
        out["first"] = [everywhere(kernel, 2), everywhere(kernel, 3)]
        calls = counting.calls
        out["again"] = [everywhere(kernel, 2), everywhere(kernel, 3)]
        out["asked again"] = counting.calls - calls
        out["warnings"] = list(records.found)
        # A program of this process's own device.
        out["alone"] = float(executor(kernel, jnp.zeros((1, 4)))[0, 0])
        with policy_override(agree=False):
            out["each"] = everywhere(kernel, 5)[0]
        out["then agreed"] = everywhere(kernel, 5)[0]
        store(kernel, 6, 99 if INDEX == 0 else 1)
        out["cannot run"] = failing(kernel, 6) if INDEX else lower_only(executor, kernel, mesh, 6)
    elif scenario == "tuning":
        with timeouts(answer_s=1, tuning_s=30), policy_override(autotune=True):
            out["tuned"] = everywhere(kernel, 2)
        out["origin"] = cache.origin(key_of(kernel, (1, 2)))
    elif scenario == "lock":
        if INDEX == 0:  # only process 0 has this lock
            file = Path(tempfile.mkdtemp()) / "lock.json"
            lock_of(kernel, {4: 6}).save(file)
            os.environ["TILEWRIGHT_LOCK"] = str(file)
            lockfile._read_environment.cache_clear()
        kernel_lock = lock_of(kernel, {2: 7})
        with use_lock(kernel_lock, miss="error"):
            out["locked"] = everywhere(kernel, 2)
        with overlay_cache(ConfigCache()) as overlay:
            overlay.put(key_of(kernel, (1, 3)), Step(8))
            out["overlaid"] = everywhere(kernel, 3)
        out["one has a lock"] = everywhere(kernel, 4)
        out["warnings"] = list(records.found)
        with timeouts(answer_s=1), use_lock(lock_of(kernel, {5: 20 + INDEX})):
            out["two locks"] = failing(kernel, 5) if INDEX else lower_only(executor, kernel, mesh, 5)
        os.environ.pop("TILEWRIGHT_LOCK", None)
        lockfile._read_environment.cache_clear()
    elif scenario == "ops":
        out |= real_ops(mesh, records)
    elif scenario == "local":
        out |= local_programs(executor, kernel, store)
    elif scenario == "silent":
        if INDEX == 1:
            with timeouts(answer_s=1):
                out["silent"] = failing(kernel, 2)
    elif scenario == "killed":
        if INDEX == 0:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            time.sleep(60)
        out["killed"] = failing(kernel, 2)
    return out


@contextlib.contextmanager
def timeouts(answer_s, tuning_s=None):
    """Other seconds than the job's to wait for an answer, or for a tuning that was announced."""
    given = {"TILEWRIGHT_AGREE_TIMEOUT_S": str(answer_s)}
    given |= {} if tuning_s is None else {"TILEWRIGHT_AGREE_TUNING_S": str(tuning_s)}
    with mock.patch.dict(os.environ, given):
        yield


def real_ops(mesh, records):
    """Attention and a matmul, with gradients; process 1 has measured other configs for them."""
    from tilewright.kernels import kernel as kernel_of
    from tilewright.modules import flash_attention, matmul
    from tilewright.ops.config.selection import default_chain
    from tilewright.ops.kernel.prepared import prepared

    x = jnp.ones((1, 256, 2, 8))
    attention = kernel_of("flash_attention")
    inv, _ = prepared(attention, (x, x, x), {"causal": True}, concrete=False)
    heuristic = attention.heuristic_cfg(inv)
    others = [c for c in attention.config_space(inv) if c != heuristic and c.backend == heuristic.backend]
    if INDEX == 1:
        default_chain().cache.put(inv.key, others[0])

    def loss(x, w):
        y = flash_attention(x, x, x, causal=True).reshape(x.shape[0], x.shape[1], -1)
        return jax.lax.psum(jnp.sin(matmul(y, w)).sum(), "x")

    step = jax.jit(jax.value_and_grad(jax.shard_map(loss, mesh=mesh, in_specs=(P("x"), P()), out_specs=P()), (0, 1)))
    random = np.random.default_rng(0)
    whole = random.standard_normal((2, 256, 2, 8)).astype(np.float32)
    given = jax.make_array_from_process_local_data(NamedSharding(mesh, P("x")), whole[INDEX : INDEX + 1])
    w = jax.make_array_from_process_local_data(NamedSharding(mesh, P()), np.ones((16, 4), np.float32), (16, 4))
    value, (_, d_w) = step(given, w)
    text = step.lower(given, w).as_text()
    return {
        "differ": len(others) > 0,
        "value": float(value.addressable_shards[0].data),
        "d_w": np.asarray(d_w.addressable_shards[0].data).sum().item(),
        "text": hash_of(text),
        "warnings": records.found,
    }


def local_programs(executor, kernel, store):
    """Programs of the two devices that each process has, without an answer from anybody."""
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("y",))
    sharding = NamedSharding(mesh, P("y"))
    x = jax.device_put(np.zeros((2, 3), np.float32), sharding)
    store(kernel, 3, 10 + INDEX)
    out = {}
    if INDEX == 1:
        call = jax.shard_map(lambda x: executor(kernel, x), mesh=mesh, in_specs=P("y"), out_specs=P("y"))
        out["mapped"] = np.asarray(jax.jit(call)(x)).ravel().tolist()
        out["eager"] = float(np.asarray(executor(kernel, x)).max())
        with jax.set_mesh(mesh):
            out["in a mesh"] = float(np.asarray(jax.jit(lambda x: executor(kernel, x))(x)).max())
        try:
            out["by arrays"] = float(np.asarray(jax.jit(lambda x: executor(kernel, x) + 1)(x)).max())
        except AgreementError as error:
            out["by arrays"] = str(error)
    return out


def hash_of(text):
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def lower_only(executor, kernel, mesh, size):
    """Decides a call as process 0 without running it, since the other process raises."""
    x = jax.ShapeDtypeStruct((2, size), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    call = jax.shard_map(lambda x: executor(kernel, x), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    jax.jit(call).lower(x)
    return "lowered"


def lock_of(kernel, sizes):
    decisions = [
        Decision.of(key_of(kernel, (1, n)), Step(number), kernel.source(Step(number))) for n, number in sizes.items()
    ]
    return Lock(device_fingerprint(), toolchain_fingerprint(), tuple(decisions))


if __name__ == "__main__":
    main()
