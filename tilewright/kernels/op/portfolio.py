"""The base classes of ops with several backends: a config names the one that runs, and its params."""

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.kernels.op.automatic import Automatic
from tilewright.kernels.op.backend import Backend
from tilewright.kernels.op.choice import DECLARED, Choice, Platform
from tilewright.kernels.op.choosing import ChoosingOp
from tilewright.kernels.op.declared import Declared
from tilewright.kernels.op.inputs import OpInputs
from tilewright.kernels.op.op import Op
from tilewright.kernels.op.sharding import Partitioning, backward_locally, explicit_mesh, forward_locally
from tilewright.ops.kernel.kernel import Invocation, errors_naming
from tilewright.ops.kernel.splitting import AUTOMATIC
from tilewright.ops.utils.promotion import default_promotion


class Portfolio[Inputs: OpInputs, Results](ChoosingOp[Inputs, Results], abc.ABC):
    """An op that runs: ``PortfolioKernel`` or ``InferenceKernel``.

    An op defines ``prepare``, ``results`` and ``reference``; the other methods of ``Op`` have defaults that suit an op
    with few arrays and no matmuls.
    """

    def types_cfg(self, *, is_split: bool) -> Choice | None:
        """A config that stands for any: its code has the declared results.

        If JAX splits the operations of a backend, as it does where the op says nothing, only these tell how.
        """
        return DECLARED if self._says_how_it_is_split or not is_split else None

    def run(self, inputs: Inputs, *, cfg: Choice) -> Any:
        with own_settings(inputs):
            inputs = self.completed(inputs)
            return self.outputs(inputs, self.forward_results(inputs, cfg))

    def forward_results(self, inputs: Inputs, cfg: Choice) -> Results:
        """Runs the chosen backend, on each device's part if the arrays' types split the call."""
        backend = self._backend(cfg)
        forward = functools.partial(backend.forward, params=cfg.params)
        return cast(Results, forward_locally(forward, self._partitioning(inputs, backend.platform), inputs))

    def automatic_cfg(self, selector: Any) -> Choice | None:
        return Choice(AUTOMATIC, selector) if self._says_how_it_is_split else None

    def xla_split_cfg(self, inv: Invocation[Choice, Any]) -> Choice:
        """The best config of a backend on the platform "xla".

        Raises:
          TypeError: the caller's platforms have none.
        """
        for choice in self._by_preference(inv):
            if self.backends.of(choice).platform is Platform.XLA:
                return choice
        raise TypeError(
            f"{self.name} on platform={self._allowed(inv)} is a kernel, which is not split over automatic mesh axes on "
            f"{inv.target.name}; use platform='xla' or None, explicit axes, or jax.shard_map"
        )

    def part_results(self, inputs: Inputs, *, cfg: Choice) -> Results:
        with own_settings(inputs):
            return self.forward_results(inputs, cfg)

    def _backend(self, cfg: Choice) -> Backend[Any, Any, Any, Any]:
        if cfg.backend == AUTOMATIC:
            return Automatic(self)
        return self._declared if cfg == DECLARED else self.backends.of(cfg)

    @property
    def _says_how_it_is_split(self) -> bool:
        return bool(self.core_dims) or type(self).partitioning is not Op.partitioning

    @functools.cached_property
    def _declared(self) -> Backend[Any, Any, Any, Any]:
        return Declared(self.results)

    def _partitioning(self, inputs: Inputs, platform: Platform) -> Partitioning | None:
        if explicit_mesh(*jax.tree.leaves(inputs)) is None:
            return None
        with errors_naming(self):
            found = self.partitioning(inputs)
        if found is None or platform is Platform.XLA:
            return found
        # XLA can split its own operations over automatic axes, but of a kernel it would gather the operands.
        return dataclasses.replace(found, shared_with_xla=False)


class PortfolioKernel[Inputs: OpInputs, Results](Portfolio[Inputs, Results], abc.ABC):
    """An op with gradients, each of which a backend computes from any other's forward results."""

    differentiable: ClassVar[bool] = True
    run_is_forward: ClassVar[bool] = True

    def residuals(self, results: Results) -> Any:
        """The arrays that the backward pass needs beside the inputs: by default the results."""
        return results

    def cotangents(self, inputs: Inputs, residuals: Any, cotangents: tuple[Any, ...]) -> Any:
        """Maps the cotangents of ``outputs`` to those of a backend's results.

        By default the outputs are the first arrays of the results; the others serve the backward pass only, and have
        none.
        """
        leaves, tree = jax.tree.flatten(residuals)
        return jax.tree.unflatten(tree, [*cotangents, *[None] * (len(leaves) - len(cotangents))])

    def argument_gradients(self, inputs: Inputs, gradients: dict[str, Any]) -> dict[str, Any]:
        """The gradients in the structures of the fields: by default each is that of an array."""
        return gradients

    def forward_mode_cfg(self, inv: Invocation[Choice, Any]) -> Choice:
        """The best config whose code JAX can differentiate in forward mode.

        Raises:
          TypeError: no backend on the caller's platforms has such code.
        """
        for choice in self._by_preference(inv):
            if self.backends.of(choice).forward_mode:
                return choice
        raise TypeError(
            f"{self.name} has no forward-mode derivative (jax.jvp, jax.linearize, jax.jacfwd, jax.hessian) on "
            f"platform={self._allowed(inv)}; use platform='xla' or None, or reverse mode (jax.grad, jax.vjp, "
            "jax.jacrev)"
        )

    def forward_with_residuals(self, inputs: Inputs, *, cfg: Choice) -> tuple[Any, Any]:
        with own_settings(inputs):
            inputs = self.completed(inputs)
            results = self.forward_results(inputs, cfg)
            return self.outputs(inputs, results), self.residuals(results)

    def backward(
        self,
        residuals: Any,
        cotangents: tuple[Any, ...],
        inputs: Inputs,
        *,
        cfg: Choice,
        wanted: frozenset[str] | None = None,
    ) -> dict[str, Any]:
        with own_settings(inputs):
            inputs = dataclasses.replace(self.completed(inputs), wanted=wanted)
            gradients = self._gradients(inputs, residuals, self.cotangents(inputs, residuals, cotangents), cfg)
        found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        return self.argument_gradients(inputs, found)

    def part_gradients(self, residuals: Any, cotangents: Any, inputs: Inputs, *, cfg: Choice) -> dict[str, Any]:
        with own_settings(inputs):
            found = self._gradients(inputs, residuals, cotangents, cfg)
        return {name: found[name] for name in inputs.gradients}

    def _gradients(self, inputs: Inputs, residuals: Any, cotangents: Any, cfg: Choice) -> dict[str, Any]:
        """The gradients of the chosen backend, from the cotangents of its results."""
        backend = self._backend(cfg)
        backward = functools.partial(backend.backward, params=cfg.params)
        return backward_locally(backward, self._partitioning(inputs, backend.platform), inputs, residuals, cotangents)


class InferenceKernel[Inputs: OpInputs, Results](Portfolio[Inputs, Results], abc.ABC):
    """An op without gradients: differentiating it raises ``TypeError``."""

    differentiable: ClassVar[bool] = False

    def no_gradient(self) -> str:
        """The reason why a call cannot be differentiated."""
        return f"{self.name} is for inference and has no gradient; see flash_attention for training"


@contextlib.contextmanager
def own_settings(operands: object) -> Iterator[None]:
    """A context in which a backend is the same program whatever the caller's settings of dtypes and promotion are."""
    with without_x64(operands), default_promotion():
        yield


def without_x64(operands: object) -> AbstractContextManager[None]:
    """A context without ``jax_enable_x64``, unless an operand has a 64-bit dtype.

    With x64, indices become int64, which GPU kernels cannot lower and which are slower elsewhere. In this context a
    backend is the same program whether x64 is enabled or not.
    """
    dtypes = (leaf.dtype for leaf in jax.tree.leaves(operands) if isinstance(leaf, jax.Array | np.ndarray))
    # Only numbers count: PRNG keys have extended dtypes, which are not numbers.
    has_64_bits = any(jnp.issubdtype(dtype, np.number) and dtype.itemsize >= 8 for dtype in dtypes)
    return contextlib.nullcontext() if has_64_bits else jax.enable_x64(False)
