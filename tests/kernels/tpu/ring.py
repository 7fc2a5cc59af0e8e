"""A ring of four devices by remote DMA: ``python -m tests.kernels.tpu.ring VARIANT DMA`` interprets it.

In a process of its own: after a race the interpreter's process is not to be trusted.
"""

import functools
import os
import sys
from typing import Any, Literal

DEVICES = 4
VARIANTS = ("right", "no credit", "no wait for what arrives", "no wait for a copy")
"""The protocol, and what is left out of it."""


def _body(
    x_ref: Any, out_ref: Any, slots: Any, copied: Any, sent: Any, arrived: Any, credit: Any, *, variant: str
) -> None:
    """Gathers the blocks of all devices, each from its left neighbour, in two slots.

    A device sends into the neighbour's other slot as soon as that has sent and stored what was in it, which it says by
    a credit.
    """
    import jax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    me = jax.lax.axis_index("x")
    right, left = (me + 1) % DEVICES, (me - 1) % DEVICES
    barrier = pltpu.get_barrier_semaphore()
    for neighbour in (left, right):
        pl.semaphore_signal(barrier, device_id=neighbour)
    pl.semaphore_wait(barrier, 2)
    load = pltpu.make_async_copy(x_ref, slots.at[0], copied)
    load.start()
    if variant != "no wait for a copy":
        load.wait()
    for step in range(DEVICES):
        slot, other = step % 2, 1 - step % 2
        is_last = step == DEVICES - 1
        if not is_last:
            send = pltpu.make_async_remote_copy(
                slots.at[slot], slots.at[other], sent.at[slot], arrived.at[other], device_id=right
            )
            if step > 0 and variant != "no credit":
                pl.semaphore_wait(credit, 1)
            send.start()
        store = pltpu.make_async_copy(slots.at[slot], out_ref.at[(me - step) % DEVICES], copied)
        store.start()
        store.wait()
        if not is_last:
            send.wait_send()
            if step < DEVICES - 2 and variant != "no credit":
                pl.semaphore_signal(credit, device_id=left)
            if variant != "no wait for what arrives":
                send.wait_recv()


def gathered(variant: str = "right") -> Any:
    """The blocks of four devices on each of them, as a function of one array over the mesh axis "x"."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    block = (8, 128)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_body, variant=variant),
        out_shape=jax.ShapeDtypeStruct((DEVICES, *block), jnp.float32),
        in_specs=[anywhere],
        out_specs=anywhere,
        scratch_shapes=[
            pltpu.VMEM((2, *block), jnp.float32),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.REGULAR,
        ],
        compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
        name="ring",
    )


def run(variant: str, dma: Literal["eager", "on_wait"]) -> None:
    """Interprets the ring and compares what it gathers.

    Raises:
      AssertionError: it is wrong.
      Exception: the interpreter has found a race.
    """
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec as P

    from tests.support.tpu_interpret import interpret_tpu

    x = np.random.default_rng(0).standard_normal((DEVICES * 8, 128)).astype(np.float32)
    with interpret_tpu(detect_races=True, dma=dma):
        mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        ring = jax.shard_map(gathered(variant), mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        found = np.asarray(jax.jit(ring)(x)).reshape(DEVICES, DEVICES, 8, 128)
    for device in range(DEVICES):
        np.testing.assert_array_equal(found[device].reshape(x.shape), x)


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    run(sys.argv[1], sys.argv[2])  # type: ignore[arg-type]
    print("right and without a race")
