"""Configs of the Triton kernels of the causal convolution: params, heuristics, and candidates for tuning."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from tilewright.kernels.causal_conv1d.inputs import ConvInputs, StepInputs
from tilewright.kernels.triton.limits import power_of_two
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id

VECTOR_BYTES = {"forward": 16, "backward": 8}
"""Bytes of a token in one thread. Backward keeps more tokens, and sums of their products, in registers."""

MAX_REGISTERS = 150
"""32-bit registers of a thread that tokens and sums may take by ``kept_registers``: with more, some were spilled."""

PROGRAMS = {"forward": 4, "backward": 8}
"""Programs for each SM that there should be at least."""

MAX_CANDIDATES = 32

MIN_SPAN, MAX_SPAN = 4, 1024
"""Tokens of a program backward: at least for each of the width + 1 sums that it writes, and at most."""


def _check(params: object, **limits: tuple[int, int]) -> None:
    for name, (low, high) in limits.items():
        value = getattr(params, name)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{type(params).__name__} needs an integer from {low} to {high}, got {name}={value!r}")
    for name in ("block_channels", "num_warps"):
        if getattr(params, name) & (getattr(params, name) - 1):
            raise ValueError(f"{type(params).__name__} needs a power of two, got {name}={getattr(params, name)}")


@stable_id("tilewright/causal_conv1d.ConvForwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class ConvForwardParams:
    """Config of the forward kernel.

    Attributes:
      block_tokens: tokens that a program loads at once.
      block_channels: channels of a program.
      num_warps: warps of a program.
      steps: blocks of tokens of a program, one after another.
    """

    block_tokens: int
    block_channels: int
    num_warps: int
    steps: int = 1

    def __post_init__(self) -> None:
        _check(self, block_tokens=(1, 64), block_channels=(1, 1 << 14), num_warps=(1, 32), steps=(1, 1 << 12))


@stable_id("tilewright/causal_conv1d.ConvBackwardParams")
@dataclasses.dataclass(frozen=True, slots=True)
class ConvBackwardParams:
    """Config of the backward kernel; a program writes a partial sum of the gradients of weight and bias.

    Attributes:
      block_tokens, block_channels, num_warps, steps: as forward.
    """

    block_tokens: int
    block_channels: int
    num_warps: int
    steps: int = 1

    def __post_init__(self) -> None:
        _check(self, block_tokens=(1, 64), block_channels=(1, 1 << 14), num_warps=(1, 32), steps=(1, 1 << 12))


@stable_id("tilewright/causal_conv1d.ConvStepParams")
@dataclasses.dataclass(frozen=True, slots=True)
class ConvStepParams:
    """Config of the kernel of a step.

    Attributes:
      block_channels: channels of a program.
      num_warps: warps of a program.
    """

    block_channels: int
    num_warps: int

    def __post_init__(self) -> None:
        _check(self, block_channels=(1, 1 << 14), num_warps=(1, 32))


type Params = ConvForwardParams | ConvBackwardParams


def span(inputs: ConvInputs, params: Params) -> int:
    """The tokens whose results a program computes."""
    tokens = params.block_tokens * params.steps
    return tokens - (inputs.width - 1) if isinstance(params, ConvBackwardParams) else tokens


def kept_registers(inputs: ConvInputs, params: Params) -> int:
    """Registers of a thread that hold tokens as they are stored, the window in float32, weights and sums."""
    elements = max(-(-params.block_channels // (32 * params.num_warps)), 1)
    stored = -(-elements * inputs.x.dtype.itemsize // 4)
    rows, width = params.block_tokens + inputs.width - 1, inputs.width
    if isinstance(params, ConvBackwardParams):
        # x and the cotangents; w, dw, db, and the last dz.
        kept = stored * (rows + params.block_tokens) + elements * (3 * width + 2)
        # The loads of states, and the gradient that is summed for each of their columns.
        return kept + (0 if inputs.initial_state is None else elements * 4 * width)
    return stored * rows + elements * (2 * width + 1)


def params_reasons(inputs: ConvInputs, params: Params) -> list[str]:
    """Reasons why params cannot serve a problem."""
    reasons = []
    if (kept := kept_registers(inputs, params)) > MAX_REGISTERS:
        reasons.append(f"{kept} registers of a thread would hold tokens and sums; at most {MAX_REGISTERS} can")
    if span(inputs, params) < 1:
        reasons.append(f"{params.block_tokens * params.steps} tokens are fewer than width={inputs.width} backward")
    return reasons


def default_params(inputs: ConvInputs, device: Device, direction: Direction) -> Params:
    """Heuristic: as much in flight as registers allow, and programs enough for all SMs."""
    batch, length, channels = inputs.x.shape
    vector = max(VECTOR_BYTES[direction] // inputs.x.dtype.itemsize, 1)
    wanted = PROGRAMS[direction] * max(device.cores, 1)
    warps, tokens = 4, 16 if direction == "forward" else 8

    def blocks() -> int:
        return -(-channels // (32 * warps * vector))

    while warps > 1 and (32 * warps * vector >= 2 * channels or batch * blocks() * -(-length // tokens) < wanted):
        warps //= 2
    while tokens > 4 and batch * blocks() * -(-length // tokens) < wanted:
        tokens //= 2
    block = min(32 * warps * vector, power_of_two(channels))
    if direction == "forward":
        found: Params = ConvForwardParams(tokens, block, warps)
    else:
        each = min(max(batch * blocks() * length // wanted, MIN_SPAN * (inputs.width + 1)), MAX_SPAN, length)
        found = ConvBackwardParams(tokens, block, warps, -(-(each + inputs.width - 1) // tokens))
    while params_reasons(inputs, found) and (found.block_tokens > 4 or found.block_channels > 32 * warps):
        if found.block_tokens > 4:
            found = dataclasses.replace(found, block_tokens=found.block_tokens // 2, steps=2 * found.steps)
        else:
            found = dataclasses.replace(found, block_channels=found.block_channels // 2)
    return found


def candidates(inputs: ConvInputs, device: Device, direction: Direction) -> list[Params]:
    """Params that are worth measuring, the heuristic's first."""
    best = default_params(inputs, device, direction)
    near = [params for params in _neighbours(inputs, best, direction) if not params_reasons(inputs, params)]
    near.sort(key=lambda params: _distance(best, params))
    return list(dict.fromkeys([best, *near]))[:MAX_CANDIDATES]


def _distance(best: Params, params: Params) -> float:
    """Number of doublings or halvings of fields between two params."""
    pairs = zip(dataclasses.astuple(best), dataclasses.astuple(params), strict=True)
    return sum(abs(math.log2(left / right)) for left, right in pairs)


def _neighbours(inputs: ConvInputs, best: Params, direction: Direction) -> Iterator[Params]:
    """Params with other vectors, warps and blocks of tokens, for as many tokens of a program, some more or fewer."""
    each = best.block_tokens * best.steps
    for vector_bytes, warps, tokens in itertools.product((4, 8, 16), (1, 2, 4, 8), (4, 8, 16, 32)):
        block = 32 * warps * max(vector_bytes // inputs.x.dtype.itemsize, 1)
        if block > power_of_two(inputs.x.shape[2]):
            continue
        for factor in (1, 2, 4) if direction == "forward" else (0.5, 1, 2):
            steps = max(math.ceil(each * factor / tokens), 1)
            yield dataclasses.replace(best, block_tokens=tokens, block_channels=block, num_warps=warps, steps=steps)


def step_params(inputs: StepInputs) -> list[ConvStepParams]:
    """Params of a step that are worth measuring, best guess first."""
    most = power_of_two(inputs.x.shape[2], 32)
    sizes = [(256, 4), (256, 2), (512, 4), (128, 4), (128, 2), (1024, 8), (64, 2)]
    return list(dict.fromkeys(ConvStepParams(min(block, most), warps) for block, warps in sizes))
