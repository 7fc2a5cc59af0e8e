"""From the command line's words to functions and arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer

from tilewright.cli.functions import parse_arrays
from tilewright.cli.options import CallOptions, parse_setting, parse_sizes
from tilewright.cli.targets import flat_call, named_calls
from tilewright.kernels import OPS, kernel
from tilewright.ops.utils.device import current_device


def make_scaled():
    """What ``module:function`` may return: a function and its arguments."""
    return jnp.multiply, (jnp.ones(3), 2.0)


def refuse(x):
    raise ValueError(f"{x.shape=} is refused\nsecond line")


def nothing():
    return None


def dots(query, key):
    return query @ key.T


def test_a_shape_becomes_a_case_with_the_fields_given():
    options = CallOptions(shape="2,128,4,32", kv_heads=2, causal=True, dtype="bfloat16", extra=("sliding_window=15",))
    (call,) = named_calls("flash_attention", options)
    assert (call.case.batch, call.case.q_length, call.case.heads, call.case.head_dim) == (2, 128, 4, 32)
    assert (call.case.kv_heads, call.case.causal, call.case.dtype) == (2, True, "bfloat16")
    assert call.case.sliding_window == 15
    out, gradients = jax.eval_shape(call.function, *call.args)
    assert out.shape == (2, 128, 4, 32)
    assert [g.shape for g in gradients[0]] == [(2, 128, 4, 32), (2, 128, 2, 32), (2, 128, 2, 32)]


@pytest.mark.parametrize("op", OPS)
def test_arrays_of_a_case_are_not_drawn(op, monkeypatch):
    """A case may have gigabytes; their shapes are enough to trace it."""
    cases = kernel(op).cases
    known = [cases.small, *cases.options.values()]
    drawn = [case.arguments() for case in known]

    class Undrawn:
        def __init__(self, *seed):
            self.generator = default_rng(*seed)

        def __getattr__(self, name):
            return getattr(self.generator, name)

        def standard_normal(self, size, *dtype):
            assert np.ndim(size) == 0, f"{size} numbers were drawn"
            return self.generator.standard_normal(size, *dtype)

    default_rng = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", Undrawn)
    for case, given in zip(known, drawn, strict=True):
        of_structs, of_arrays = (jax.tree.flatten(each) for each in (case.abstract_arguments(), given))
        assert of_structs[1] == of_arrays[1]
        for struct, leaf in zip(of_structs[0], of_arrays[0], strict=True):
            if isinstance(leaf, jax.Array):
                assert struct == jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            else:
                assert type(struct) is type(leaf)


def test_what_is_turned_off_is_given():
    options = CallOptions(shape="1,64,2,16", causal=False, extra=("sliding_window=0", "dropout_prob=0.0"))
    assert options.fields() == {"causal": False, "sliding_window": 0, "dropout_prob": 0.0}
    assert CallOptions(shape="1,64,2,16").fields() == {}


def test_named_cases_and_all_of_them():
    from tilewright.cli.targets import op_cases
    from tilewright.kernels import kernel

    every = op_cases("flash_attention", CallOptions(cases=("all",)))
    assert [case.name for case in every] == list(kernel("flash_attention").cases.of_device(current_device().kind))
    one = op_cases("flash_attention", CallOptions(cases=("causal_4k",), dtype="float16"))
    assert (one[0].name, one[0].dtype) == ("causal_4k", "float16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CallOptions(), "needs either --shape"),
        (CallOptions(shape="1,2,3"), "is not batch,q_length,heads,head_dim"),
        (CallOptions(shape="1,2,x,4"), "whole numbers"),
        (CallOptions(shape="1,2,-3,4"), "negative size"),
        (CallOptions(shape="1,64,3,16", kv_heads=2), "multiple of the number of key heads"),
        (CallOptions(shape="1,64,2,16", extra=("sliding_window=-3",)), "sliding_window"),
        (CallOptions(shape="1,64,2,16", extra=("sliding",)), "name=value"),
        (CallOptions(shape="1,64,2,16", extra=("flavour=3",)), "flavour"),
        (CallOptions(shapes="float32[3]"), "--shapes"),
    ],
)
def test_wrong_options_are_usage_errors_that_name_the_value(options, message):
    with pytest.raises(typer.BadParameter) as caught:
        named_calls("flash_attention", options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("math:", CallOptions(), "module:function"),
        (f"{__name__}:make_scaled", CallOptions(kv_heads=2), "takes --shapes"),
        (f"{__name__}:refuse", CallOptions(shapes="float32[3]"), "x.shape=(3,)"),
        (f"{__name__}:dots", CallOptions(), "dots takes (query, key): give its arrays with --shapes"),
        (f"{__name__}:dots", CallOptions(shapes="float32[3]"), "got 1 array"),
        (f"{__name__}:dotz", CallOptions(shapes="float32[3]"), "did you mean dots?"),
        (f"{__name__}:nothing", CallOptions(), "returned None, neither arrays nor (function, arguments)"),
        (f"{__name__}:__name__", CallOptions(), "cannot be called"),
        ("./nonesuch.py:f", CallOptions(), "no file 'nonesuch.py'"),
        ("no-module:f", CallOptions(), "neither a module's name nor a file"),
        ("flash_attention:f", CallOptions(), "no module 'flash_attention'"),
        (f"{__name__}:dots", CallOptions(shapes="float32[3"), "is not arrays"),
        (f"{__name__}:dots", CallOptions(shapes="flat32[3]"), "no dtype"),
    ],
)
def test_wrong_targets_are_usage_errors(target, options, message):
    with pytest.raises(typer.BadParameter) as caught:
        named_calls(target, options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_functions_with_shapes_and_with_arguments_of_their_own():
    (call,) = named_calls(f"{__name__}:dots", CallOptions(shapes="float32[4,8]; float32[5,8]"))
    assert jax.eval_shape(call.function, *call.args).shape == (4, 5)
    (call,) = named_calls(f"{__name__}:make_scaled", CallOptions())
    np.testing.assert_array_equal(call.function(*call.args), [2, 2, 2])


def test_arrays_of_all_ranks_and_dtypes():
    arrays = parse_arrays("float32[1,2] bfloat16[3],int32[]")
    assert [(a.shape, a.dtype) for a in arrays] == [
        ((1, 2), jnp.float32), ((3,), jnp.bfloat16), ((), jnp.int32),
    ]  # fmt: skip


def test_an_array_that_stands_twice_stays_one():
    seen = []

    def function(x, *, left, right):
        seen.append(left is right)
        return x * left.sum() * right.sum()

    boundaries, x = jnp.arange(3), jnp.ones(2)
    call, args = flat_call(function, (x,), {"left": boundaries, "right": boundaries}, True)
    out, ((gradient,),) = jax.jit(call)(*args)
    assert seen == [True]
    np.testing.assert_array_equal(out, [9, 9])
    np.testing.assert_array_equal(gradient, [9, 9])


def test_settings_and_sizes():
    assert parse_setting("sliding_window=(3, None)") == ("sliding_window", (3, None))
    assert parse_setting("bias=hqk") == ("bias", "hqk")
    assert parse_sizes("", "--shape") == ()
    assert parse_sizes("1, 2", "--shape") == (1, 2)
