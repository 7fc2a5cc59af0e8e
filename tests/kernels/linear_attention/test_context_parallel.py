"""Linear attention over several devices: results and gradients of one device, exactly so in float64."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels.linear_attention.recurrences import draw, oracle
from tests.support.draws import zeros
from tilewright.modules import context_parallel_linear_attention, gated_delta_rule, linear_attention

HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6, 5
TOKENS = P(None, "s")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call over some devices, with ``length`` tokens on each.

    Attributes:
      cum_seqlens, seq_lengths: of the whole rows.
    """

    devices: int
    length: int
    gate: str = "none"
    update: str = "none"
    batch: int = 1
    cum_seqlens: tuple[int, ...] | None = None
    seq_lengths: tuple[int, ...] | None = None
    states: bool = True
    check_vma: bool = True
    kind: AxisType = AxisType.Auto

    @property
    def sequences(self) -> int:
        return self.batch if self.cum_seqlens is None else len(self.cum_seqlens) - 1

    def options(self) -> dict[str, Any]:
        given = {"cum_seqlens": self.cum_seqlens, "seq_lengths": self.seq_lengths}
        return {name: jnp.asarray(x, jnp.int32) for name, x in given.items() if x is not None}

    def arrays(self) -> dict[str, jax.Array]:
        rng = np.random.default_rng(11)
        tokens = (self.batch, self.devices * self.length)

        def normal(*shape: int) -> Any:
            return rng.standard_normal(shape)

        found = {
            "query": normal(*tokens, HEADS, KEY_DIM),
            "key": normal(*tokens, HEADS, KEY_DIM) / KEY_DIM**0.5,
            "value": normal(*tokens, VALUE_HEADS, VALUE_DIM),
        }
        shapes = {"token": (*tokens, VALUE_HEADS), "channel": (*tokens, VALUE_HEADS, KEY_DIM), "head": (VALUE_HEADS,)}
        if self.gate != "none":
            found["log_decay"] = -0.1 * normal(*shapes[self.gate]) ** 2
        if self.update == "beta":
            found["beta"] = 1 / (1 + np.exp(normal(*shapes["token"])))
        if self.update == "removal":
            found["a"] = -normal(*shapes["channel"]) / KEY_DIM**0.5
            found["b"] = 0.5 * normal(*shapes["channel"]) / KEY_DIM**0.5
        if self.update == "bonus":
            found["bonus"] = normal(VALUE_HEADS, KEY_DIM)
        if self.states:
            found["initial_state"] = normal(self.sequences, VALUE_HEADS, KEY_DIM, VALUE_DIM)
        return {name: jnp.asarray(x) for name, x in found.items()}

    def specs(self) -> dict[str, P]:
        whole = {"bonus", "initial_state", *(["log_decay"] if self.gate == "head" else [])}
        return {name: P() if name in whole else TOKENS for name in self.arrays()}

    def over_devices(self, arrays: dict[str, Any]) -> Any:
        return attend(context_parallel_linear_attention, arrays, self, axis_name="s")

    def mapped(self, function: Callable[..., Any] | None = None, out: Any = None) -> Any:
        """A function of the arrays by name over the devices; by default the op."""
        specs = (TOKENS, P()) if self.states else TOKENS
        return jax.shard_map(
            self.over_devices if function is None else function,
            mesh=self.mesh, in_specs=(self.specs(),), out_specs=specs if out is None else out,
            check_vma=self.check_vma,
        )  # fmt: skip

    @functools.cached_property
    def mesh(self) -> Any:
        return jax.make_mesh((self.devices,), ("s",), axis_types=(self.kind,), devices=jax.devices()[: self.devices])

    def run(self, function: Callable[..., Any], arrays: dict[str, Any]) -> Any:
        """A jitted function of the arrays, which are split."""
        with jax.set_mesh(self.mesh):
            placed = {n: jax.device_put(x, NamedSharding(self.mesh, self.specs()[n])) for n, x in arrays.items()}
            return jax.jit(function)(placed)


def attend(function: Callable[..., Any], arrays: dict[str, Any], call: Call, **options: Any) -> Any:
    arrays = dict(arrays)
    if "a" in arrays:
        arrays["removal"] = arrays.pop("a"), arrays.pop("b")
    return function(**arrays, return_state=call.states, **call.options(), **options)


def both_passes(function: Callable[..., Any]) -> Callable[[dict[str, Any]], Any]:
    """The results of a function, and the gradients by name from cotangents of every size."""

    def run(arrays: dict[str, Any]) -> Any:
        found, pull = jax.vjp(function, arrays)
        return found, pull(jax.tree.map(jnp.cos, found))[0]

    return run


CALLS = {
    "sums": Call(2, 9, batch=2),
    "decays of heads": Call(4, 5, "head", batch=2),
    "simple gates, lengths, devices without tokens": Call(4, 7, "token", batch=3, seq_lengths=(28, 9, 0)),
    "delta rule": Call(4, 9, "none", "beta", batch=2),
    "gated delta rule": Call(4, 19, "token", "beta", batch=2),
    "gated delta rule on eight": Call(8, 3, "token", "beta"),
    "gated delta rule of heads, lengths": Call(4, 6, "head", "beta", batch=2, seq_lengths=(7, 24)),
    "channels": Call(8, 3, "channel"),
    "delta rule of channels": Call(4, 17, "channel", "beta", states=False),
    "removal": Call(4, 11, "channel", "removal", batch=2),
    "bonus": Call(2, 9, "channel", "bonus", batch=2),
    "packed, over borders and whole devices": Call(4, 8, "token", "beta", cum_seqlens=(2, 5, 5, 26, 30)),
    "packed, at borders": Call(4, 8, "channel", "beta", cum_seqlens=(0, 0, 8, 16, 16, 32, 32)),
    "packed, all on one device": Call(4, 8, "token", cum_seqlens=(17, 19, 20, 20)),
    "packed, beyond the row": Call(2, 8, "head", "bonus", cum_seqlens=(0, 11, 20)),
    "packed, one for all": Call(8, 4, "channel", "removal", cum_seqlens=(0, 32)),
    "packed sums on eight": Call(8, 4, cum_seqlens=(1, 2, 3, 4, 5, 6, 23, 31)),
    "one device": Call(1, 9, "token", "beta", cum_seqlens=(0, 4, 8)),
    "types unchecked": Call(4, 5, "head", "beta", batch=2, check_vma=False),
    "packed, types unchecked, no states": Call(4, 8, "token", cum_seqlens=(3, 12, 30), states=False, check_vma=False),
    "explicit axes": Call(4, 5, "token", "beta", batch=2, kind=AxisType.Explicit),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_one_device(name: str):
    """In float64, where an error of the algorithm is no rounding."""
    call = CALLS[name]
    with jax.enable_x64(True):
        arrays = call.arrays()
        got = call.run(both_passes(call.mapped()), arrays)
        wanted = jax.jit(both_passes(lambda arrays: attend(linear_attention, arrays, call)))(arrays)
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-11, rtol=1e-11, err_msg=str(path))
        assert np.any(np.asarray(other)), path


@dataclasses.dataclass(frozen=True)
class Typed:
    """A call on two by two devices whose types split it: by tokens, and some arrays by rows or heads as well."""

    call: Call
    axes: dict[str, P]
    out: P


TYPED = {
    "tokens and heads": Typed(
        Call(2, 9, "token", "beta", batch=2), {"query": P(None, "s", "m"), "value": P(None, None, "m")},
        P(None, "s", "m", None),
    ),
    "tokens and rows": Typed(
        Call(2, 9, "head", "bonus", batch=2, seq_lengths=(7, 12)), {"key": P("m"), "value": P(None, "s")},
        P("m", "s", None, None),
    ),
    "tokens by both axes, packed": Typed(
        Call(4, 5, "channel", "removal", cum_seqlens=(1, 8, 8, 18)), {"query": P(None, ("s", "m"))},
        P(None, ("s", "m"), None, None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPED)
def test_types_that_split_tokens(name: str):
    typed = TYPED[name]
    call, function = typed.call, both_passes(lambda arrays: attend(linear_attention, arrays, typed.call))
    mesh = jax.make_mesh((2, 2), ("s", "m"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.enable_x64(True):
        arrays = call.arrays()
        wanted = jax.jit(function)(arrays)
        with jax.set_mesh(mesh):
            got = jax.jit(function)(
                {n: jax.device_put(x, NamedSharding(mesh, typed.axes.get(n, P()))) for n, x in arrays.items()}
            )
    assert got[0][0].sharding.spec == typed.out
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-11, rtol=1e-11, err_msg=str(path))


@pytest.mark.parametrize("packing", [{}, {"cum_seqlens": [2, 9, 30]}, {"seq_lengths": [19]}])
def test_a_name_with_raw_gates_follows_the_types(packing: dict[str, list[int]]):
    arrays = {key: jnp.asarray(x, jnp.float32) for key, x in draw("gated_delta_rule", 3, batch=1, length=32).items()}
    arrays |= {"a": arrays.pop("g"), "b": arrays.pop("beta"), "A_log": jnp.zeros(2), "dt_bias": jnp.ones(2)}
    options = {name: jnp.asarray(each, jnp.int32) for name, each in packing.items()}

    def rule(arrays: dict[str, Any]) -> Any:
        return gated_delta_rule(**arrays, **options, return_state=True, qk_l2norm=True)

    wanted = jax.jit(both_passes(rule))(arrays)
    mesh = jax.make_mesh((4,), ("s",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        placed = {
            name: jax.device_put(x, NamedSharding(mesh, TOKENS if x.ndim > 1 else P())) for name, x in arrays.items()
        }
        got = jax.jit(both_passes(rule))(placed)
    assert got[0][0].sharding.spec == P(None, "s", None, None)
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5, err_msg=str(path))


def test_types_that_cannot_be_followed_are_refused():
    mesh = jax.make_mesh((2, 2), ("s", "m"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        x = jax.device_put(zeros((1, 8, 2, 4)), NamedSharding(mesh, TOKENS))
        with pytest.raises(ValueError, match="linear_attention: segment_ids cannot be followed"):
            linear_attention(x, x, x, segment_ids=zeros((1, 8), np.int32))
        for spec in (P(None, None, None, "m"), P(None, "m"), P(None, None, "s")):
            other = jax.device_put(x, NamedSharding(mesh, spec))
            with pytest.raises(ValueError, match="linear_attention: arrays must be split alike"):
                linear_attention(x, x, other)


def test_old_history_against_the_recurrence():
    """A huge first value that has decayed when others read it, over several borders, in float32."""
    arrays = draw("gated_delta_rule", 5, batch=1, length=64)
    arrays["v"][:, 0] = 1e4
    arrays["v"][:, 1:] = 0.0
    arrays["g"][:] = -0.3
    wanted, wanted_state = oracle("gated_delta_rule", arrays)
    names = {"q": "query", "k": "key", "v": "value", "g": "log_decay", "beta": "beta"}
    given = {names[name]: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    call = Call(8, 8)
    mesh, whole = call.mesh, dict.fromkeys(given, TOKENS)
    out, state = jax.jit(jax.shard_map(call.over_devices, mesh=mesh, in_specs=(whole,), out_specs=(TOKENS, P())))(given)
    size = np.sqrt((wanted**2).mean((0, 2, 3)))
    assert size[-1] < 1e-4 * size[0]
    error = np.sqrt(((np.asarray(out, np.float64) - wanted) ** 2).mean((0, 2, 3)))
    assert np.all(error < 2e-5 * size)
    assert np.abs(state - wanted_state).max() < 2e-5 * np.abs(wanted_state).max()


def gathers(call: Call) -> list[str]:
    """The types of what the all-gathers of both passes give, of which there is no other collective."""
    text = jax.jit(both_passes(call.mapped())).lower(call.arrays()).compile().as_text()
    assert not re.findall(r" (all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)
    return re.findall(r"= \(?(\w+\[[\d,]*\])\S* all-gather", text)


@pytest.mark.parametrize("length", [6, 12])
def test_what_is_sent_depends_neither_on_the_length_nor_on_the_number_of_sequences(length: int):
    """Of one state for each row, its map and what is added: one gather in either pass."""
    rows = Call(4, length, "token", "beta", batch=2, states=False)
    assert gathers(rows) == [f"f32[4,2,{VALUE_HEADS},{KEY_DIM},{KEY_DIM + VALUE_DIM}]"] * 2
    packed = Call(4, length, "channel", cum_seqlens=(0, 3, 9, 20), states=False)
    assert gathers(packed) == [f"f32[4,1,{VALUE_HEADS},{KEY_DIM},{1 + VALUE_DIM}]"] * 2


def test_bfloat16_beside_float32():
    """Two passes round no more than one: the states between devices are float32."""
    call = Call(4, 16, "token", "beta", states=False)
    arrays = {name: x.astype(jnp.float32) for name, x in call.arrays().items()}
    low = {name: x.astype(jnp.bfloat16) if name in ("query", "key", "value") else x for name, x in arrays.items()}
    wanted = attend(linear_attention, {name: x.astype(jnp.float32) for name, x in low.items()}, call)
    alone = attend(linear_attention, low, call)
    got = call.run(call.mapped(), low)
    assert got.dtype == jnp.bfloat16
    error = np.abs(np.asarray(got, np.float32) - wanted).max()
    assert error <= 1.5 * np.abs(np.asarray(alone, np.float32) - wanted).max()


def test_padding_of_nan_reaches_nothing():
    call = Call(4, 8, "token", "beta", cum_seqlens=(2, 5, 26))
    arrays = {name: x.astype(jnp.float32) for name, x in call.arrays().items()}
    poisoned = {
        name: x if name == "initial_state" else x.at[:, jnp.array([0, 1, 26, 31])].set(jnp.nan)
        for name, x in arrays.items()
    }
    (found, gradients), (wanted, expected) = (call.run(both_passes(call.mapped()), x) for x in (poisoned, arrays))
    for one, other in zip(jax.tree.leaves((found, gradients)), jax.tree.leaves((wanted, expected)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_remat_and_second_derivatives():
    call = Call(2, 6, "token", "beta")

    def penalty(function: Callable[..., Any]) -> Any:
        def squares(arrays: dict[str, Any]) -> Any:
            return sum(jnp.sum(x * x) for x in jax.tree.leaves(both_passes(function)(arrays)))

        return jax.grad(squares)

    with jax.enable_x64(True):
        arrays = call.arrays()
        got = call.run(penalty(call.mapped(jax.checkpoint(call.over_devices))), arrays)
        wanted = jax.jit(penalty(lambda arrays: attend(linear_attention, arrays, call)))(arrays)
    for name, other in wanted.items():
        np.testing.assert_allclose(got[name], other, atol=1e-9, rtol=1e-9, err_msg=name)


TOKEN = zeros((1, 4, 2, 3))
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "axis": ({"axis_name": "t"}, ValueError, "axis_name='t' is no axis of a surrounding jax.shard_map"),
    "two updates": ({"beta": zeros((1, 4, 2)), "bonus": zeros((2, 3))}, ValueError, "a call has one of them"),
    "states": ({"initial_state": zeros((2, 2, 3, 3))}, ValueError, "initial_state must have the shape"),
    "segments": ({"segment_ids": zeros((1, 4), np.int32)}, TypeError, "has no argument 'segment_ids'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_call_is_refused(name: str):
    changed, error, message = REFUSED[name]
    mesh = jax.make_mesh((2,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    run = jax.shard_map(
        lambda x: context_parallel_linear_attention(x, x, x, **{"axis_name": "s", **changed}),
        mesh=mesh, in_specs=P(), out_specs=P(None, "s"),
    )  # fmt: skip
    with pytest.raises(error, match=f"context_parallel_linear_attention.*{re.escape(message)}"):
        run(TOKEN)
