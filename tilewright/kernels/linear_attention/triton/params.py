"""Configs of linear attention in Triton: params, and those worth measuring."""

import dataclasses

from tilewright.kernels.linear_attention.chunks import CHUNK
from tilewright.kernels.linear_attention.inputs import LinearAttentionInputs
from tilewright.kernels.linear_attention.passes.chunks import TritonPass
from tilewright.kernels.op.footprint import Footprint, launch_reasons
from tilewright.kernels.triton.limits import MIN_DOT, power_of_two
from tilewright.ops.types import Device, Direction
from tilewright.ops.utils.stable_ids import stable_id

WIDE = 64
"""Channels of values of a program of a pass over states, at most, where four warps hold a state of 128 rows."""

MAX_SPLIT_KEY_DIM = 128
"""Channels of keys up to which what a segment makes of a state, [K, K], is in registers."""

MIN_SEGMENT = 8
"""Chunks of a segment: what is behind it takes as long as a few chunks."""


@stable_id("tilewright/linear_attention.TritonLinearAttentionParams")
@dataclasses.dataclass(frozen=True, slots=True)
class TritonLinearAttentionParams:
    """Config of either direction.

    Attributes:
      states: the pass from chunk to chunk, over states or over their gradients.
      tokens: the passes that are parallel over chunks.
      segment: chunks of a segment; sequences are split into segments that run at once, and whose effect on a state is
        computed first. With 0 they are not split.
      recomputed: the pass over states that the backward direction repeats; None takes ``states``.
    """

    states: TritonPass
    tokens: TritonPass
    segment: int = 0
    recomputed: TritonPass | None = None

    def __post_init__(self) -> None:
        if type(self.segment) is not int or self.segment < 0:
            raise ValueError(f"segment must not be negative, got {self.segment!r}")
        for name in ("states", "tokens"):
            if not isinstance(getattr(self, name), TritonPass):
                raise TypeError(f"{name} must be a TritonPass, got {getattr(self, name)!r}")
        if not isinstance(self.recomputed, TritonPass | None):
            raise TypeError(f"recomputed must be a TritonPass or None, got {self.recomputed!r}")


def has_wgmma(device: Device) -> bool:
    """True if matmuls read their operands from shared memory; elsewhere they are in registers."""
    return device.capability is not None and (9, 0) <= device.capability < (12, 0)


def footprints(
    inputs: LinearAttentionInputs, device: Device, direction: Direction, params: TritonLinearAttentionParams
) -> list[Footprint]:
    """The passes over states, which take more shared memory than the others; estimates from above."""
    passes = [(params.states, direction == "backward")]
    if direction == "backward" and params.recomputed is not None:
        passes.append((params.recomputed, False))
    return [_footprint(inputs, device, tile, gradients) for tile, gradients in passes]


def _footprint(inputs: LinearAttentionInputs, device: Device, tile: TritonPass, gradients: bool) -> Footprint:
    itemsize = 2 if inputs.value.dtype.name == "bfloat16" else 4
    key_dim = power_of_two(inputs.key_dim, MIN_DOT)
    block_v = min(tile.block_v, power_of_two(inputs.value_dim, MIN_DOT))
    backward, delta, channel = gradients, inputs.beta is not None, inputs.gate == "channel"
    removal = inputs.removal is not None
    # Of tokens: keys, backward queries, too; with decays of channels a delta rule has keys twice, as they read and as
    # they write, and a removal has arrays of its own for both. Without a pipeline they are not there at once.
    of_keys = min(1 + backward + (channel and delta) + 2 * removal, 4 if tile.num_stages > 1 else 2)
    of_values = 2 if backward and not channel else 1
    solves, pairs = delta or removal, removal + (1 + removal if backward and channel else 0)
    of_pairs = 4 * solves + itemsize * pairs
    loads = CHUNK * ((of_keys * key_dim + of_values * block_v) * itemsize + CHUNK * of_pairs)
    state = key_dim * block_v * itemsize
    if has_wgmma(device):
        shared = tile.num_stages * loads + state + CHUNK * block_v * itemsize
    else:
        shared = (tile.num_stages - 1) * loads + state
        shared += CHUNK * max(key_dim * itemsize, CHUNK * 4 if channel and solves else 0)
    if channel:  # the last sums, strengths, and values in another layout
        shared += tile.num_stages * 4 * (key_dim + CHUNK) + 2 * CHUNK * block_v * itemsize
    blocks = inputs.sequences * inputs.value_heads * -(-inputs.value_dim // block_v)
    return Footprint(blocks=blocks, threads=32 * tile.num_warps, shared_bytes=shared)


def segments(inputs: LinearAttentionInputs, device: Device) -> list[int]:
    """Chunks of a segment that are worth measuring, best guess first; 0 is no split.

    A split runs the pass over states about twice more without a delta rule, three times with one, so it pays where
    that leaves multiprocessors without a program otherwise.
    """
    chains = inputs.sequences * inputs.value_heads * -(-inputs.value_dim // WIDE)
    if inputs.key_dim > MAX_SPLIT_KEY_DIM or (2 if inputs.beta is None else 3) * chains > device.cores:
        return [0]
    # By shapes alone, as bits of results depend on it: of sequences of one length, two programs a multiprocessor.
    chunks = -(-inputs.batch * inputs.length // (CHUNK * inputs.sequences))
    size = max(power_of_two(chunks * chains // (2 * device.cores)), MIN_SEGMENT)
    return [size, 0, 2 * size] if chunks >= 4 * size else [0]


def listed_params(
    inputs: LinearAttentionInputs, device: Device, direction: Direction
) -> list[TritonLinearAttentionParams]:
    """Params worth measuring, best guess first."""
    listed = (_of_channels if inputs.gate == "channel" else _of_heads)(inputs, device, direction)
    fitting = [each for each in listed if not launch_reasons(footprints(inputs, device, direction, each), device)]
    return fitting or listed[-1:]


def _of_heads(inputs: LinearAttentionInputs, device: Device, direction: Direction) -> list[TritonLinearAttentionParams]:
    """With a decay for each head, or none."""
    narrow, forward = inputs.value.dtype.name == "bfloat16", direction == "forward"
    split = segments(inputs, device)
    wide = narrow and has_wgmma(device) and inputs.key_dim <= 128
    chains = inputs.sequences * inputs.value_heads
    if split[0]:
        chains *= max(inputs.batch * inputs.length // (CHUNK * split[0] * inputs.sequences), 1)
    most = power_of_two(inputs.value_dim, MIN_DOT)
    # Two of these programs fit a multiprocessor.
    states = _states(inputs, chains, WIDE if wide else 32, device.cores * 5 // 4)
    recomputed = None
    if not forward and wide:
        # With the loads of both directions one of 64 channels fills it, as one of 128 does.
        recomputed, states = states[0], _states(inputs, chains, 2 * WIDE, device.cores)
    tile = min(most, 64 if narrow and has_wgmma(device) else 32)
    tokens = [TritonPass(tile, 4, 2), TritonPass(min(most, 128), 8, 2), TritonPass(min(most, 32), 4, 3)]
    if not forward:
        # With three stages all blocks of 128 channels of values are on their way before the first is needed.
        tokens = [TritonPass(tile, 4, 3), TritonPass(tile, 4, 1), TritonPass(tile, 8, 3), TritonPass(tile, 8, 1)]
    first = TritonLinearAttentionParams(states[0], tokens[0], split[0], recomputed)
    listed = [
        first,
        *(dataclasses.replace(first, states=each) for each in states),
        *(dataclasses.replace(first, tokens=each) for each in tokens),
        *(dataclasses.replace(first, segment=each) for each in split),
    ]
    return list(dict.fromkeys(listed))


def _of_channels(
    inputs: LinearAttentionInputs, device: Device, direction: Direction
) -> list[TritonLinearAttentionParams]:
    """With a decay for each channel of the keys: sequences are not split."""
    narrow, hopper = inputs.value.dtype.name == "bfloat16", has_wgmma(device)
    most = power_of_two(inputs.value_dim, MIN_DOT)
    widest = 64 if narrow and hopper and inputs.key_dim <= 128 else 32
    widths = [width for width in (64, 32, 16) if width <= min(most, widest)]
    # A wide block reads keys and inverses less often; a narrow one has more programs.
    chains = inputs.sequences * inputs.value_heads
    enough = [width for width in widths if chains * -(-inputs.value_dim // width) >= device.cores]
    best = (enough or widths[-1:])[0]
    widths = sorted(widths, key=lambda width: width != best)
    warps = (4, 8) if narrow and hopper and inputs.key_dim <= 128 else (8, 4)
    stages = (2, 3, 1) if narrow else (1, 2)
    tile = min(most, 64 if narrow and hopper else 32)
    tokens = [TritonPass(tile, 4, 2), TritonPass(min(most, 128), 8, 2), TritonPass(min(most, 32), 4, 3)]
    if direction == "backward":
        # With two stages a few of the accumulators spill.
        tile = min(tile, 16 if inputs.removal is not None else 32)
        tokens = [TritonPass(tile, 8, 1), TritonPass(tile, 8, 2), TritonPass(min(most, 32), 8, 1)]
    states = [TritonPass(width, count, depth) for width in widths for count in warps for depth in stages]
    listed = [TritonLinearAttentionParams(each, tokens[0]) for each in states]
    return list(dict.fromkeys([*listed, *(TritonLinearAttentionParams(states[0], each) for each in tokens)]))


def _states(inputs: LinearAttentionInputs, chains: int, widest: int, programs: int) -> list[TritonPass]:
    """Launches of a pass over states, best guess first, when so many programs run at once."""
    narrow, wide = inputs.value.dtype.name == "bfloat16", widest >= WIDE
    most = power_of_two(inputs.value_dim, MIN_DOT)
    widths = [width for width in (128, 64, 32, 16) if width <= min(most, widest)]
    # A wide block reads keys and inverses less often; narrow ones are worth it as long as they all run at once.
    at_once = [width for width in widths if chains * -(-inputs.value_dim // width) <= programs]
    best = (at_once[-1:] or widths[:1])[0]
    widths = sorted(widths, key=lambda width: width != best)
    stages = (3, 2, 1) if narrow else (1, 2)
    return [
        TritonPass(width, warps, depth)
        for width in widths
        for warps in ((8,) if width > WIDE else (4, 8) if wide else (8, 4))
        for depth in stages
    ]
