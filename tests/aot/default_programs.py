"""Compiles a small call of every op for a GPU that is not here: ``python -m tests.aot.default_programs "NVIDIA B200"``.

In a process of its own: after a program for one architecture, ptxas refuses another's in XLA.
"""

import sys

import jax

import tilewright
from tests.every_op.matrix import call_of, every_op, without_builds


def main(name: str) -> None:
    """Prints each op whose default call, with its gradients, is compiled."""
    for op in every_op():
        function, arrays = call_of(op, "bfloat16").training()
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        with without_builds(), tilewright.target_device(name) as target:
            jax.jit(function).lower(*structs).compile(device_assignment=target.devices)
        print(op, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
