"""Every entry of the shipped tables answers the call that it was measured for, and earlier tables do, too."""

import collections
import inspect
import json
import sys
from pathlib import Path

import pytest

import tilewright
from tilewright.kernels import OPS, kernel, masks
from tilewright.kernels.flash_attention.cuda.selection import TABLES
from tilewright.ops import AutotuningResult, ConfigSelectorChain, Invocation
from tilewright.ops.config.tables import load_tables
from tilewright.ops.utils.device import device_of_fingerprint
from tilewright.ops.utils.serialize import resolve
from tilewright.ops.utils.stable_ids import id_of, with_former_names

FOLDER = Path(tilewright.__file__).parent / "tables"
ENTRIES = {"nvidia-h100-80gb-hbm3": 113, "nvidia-h200": 54}
OF_OLD = "flash_attention"  # the op that had entries in version 0.1.0
# What stood there in place of a backend's name.
PLATFORMS = {
    "hopper": ("PALLAS", None),
    "cuda": ("CUDA", None),
    "cudnn": ("CUDA", "cudnn"),
    "fa4": ("CUDA", "fa4"),
    "xla": ("XLA", None),
    "triton": ("TRITON", None),
}
# By table and op; no source is known of what was measured before tables had it.
STALE = {name: {"flash_attention": 54} for name in ENTRIES}
STALE["nvidia-h100-80gb-hbm3"] |= {
    "ragged_page_attention": 2,  # a kernel that is faster since
    # Their modules take more scales since.
    "grouped_matmul": 8,
    "gated_grouped_matmul": 4,
    "linear_cross_entropy": 2,
}


def call_of(key):
    """The invocation of a key, made anew from what the key says, without ``prepare``."""
    said = json.loads(key)
    return Invocation.of_description(kernel(said["op"]), said, said["direction"], device_of_fingerprint(said["device"]))


@pytest.fixture(params=ENTRIES)
def name(request):
    return request.param


@pytest.fixture(params=["as shipped", "as of version 0.1.0"])
def folder(request, name, tmp_path):
    """A table with stable ids and names of backends; and one with the module paths and platforms that stood there."""
    text = (FOLDER / f"{name}.json").read_text()
    assert '"tilewright.kernels' not in text
    if request.param == "as shipped":
        return FOLDER
    AutotuningResult.from_json(text)  # former names are known of classes that are loaded
    (old,) = with_former_names(text)
    said = json.loads(old)
    said["entries"] = [call for call in said["entries"] if call["op"] == OF_OLD]
    for call in said["entries"]:  # keys are JSON in JSON, and had every option of a call
        (key,) = call_of(call["key"]).former_keys
        (call["key"],) = with_former_names(key) or [key]
        for candidate in call["candidates"]:
            fields = candidate["config"]["fields"]
            platform, algorithm = PLATFORMS[fields.pop("backend")]
            enum = {"$enum": "tilewright.kernels.registry:Platform", "name": platform}
            fields |= {"platform": enum, "algorithm": algorithm}
    (tmp_path / f"{name}.json").write_text(json.dumps(said))
    assert "tilewright/" not in (tmp_path / f"{name}.json").read_text()
    return tmp_path


def test_each_entry_is_a_hit(name, folder):
    device = json.loads((FOLDER / f"{name}.json").read_text())["device"]
    table, chain = load_tables(device, folder), ConfigSelectorChain(tables=folder)
    known = load_tables(device)
    assert len(known) == ENTRIES[name]
    if folder != FOLDER:
        known = {key: entry for key, entry in known.items() if entry.op == OF_OLD}
    assert len(table) == len(known)
    for key, entry in known.items():
        inv = call_of(key)
        assert inv.key == key
        found = chain.lookup(inv)
        assert found.step == "shipped", (entry.shapes, found)
        assert found.config in entry.ranked


def test_which_entries_are_stale(name):
    """Kernels that have changed since: ``python -m tools.tables all`` on the card measures them anew.

    Whoever changes a kernel, and does not, writes the new numbers down above.
    """
    device = json.loads((FOLDER / f"{name}.json").read_text())["device"]
    stale = [entry for entry in load_tables(device).values() if entry.is_stale(kernel(entry.op))]
    found = dict(collections.Counter(entry.op for entry in stale))
    assert found == STALE[name], [(entry.op, entry.direction, entry.shapes) for entry in stale]


def test_a_variant_that_is_gone_is_passed_over(name, tmp_path):
    """Params name variants by strings, which any version reads: the next config of the entry is taken."""
    said = json.loads((FOLDER / f"{name}.json").read_text())
    (entry,) = (each for each in said["entries"] if each["shapes"].startswith("f16") and each["direction"] == "forward")
    winner = entry["candidates"][entry["chosen"]]
    gone = {"$dataclass": "tilewright/flash_attention.CudaForwardParams", "fields": {"variant": "fmha_hopperF_gone"}}
    config = {"$dataclass": "tilewright/portfolio.Choice", "fields": {"backend": "cuda", "params": gone}}
    entry["candidates"].append(winner | {"config": config, "heuristic": False})
    entry["chosen"] = len(entry["candidates"]) - 1
    (tmp_path / f"{name}.json").write_text(json.dumps(said))
    inv = call_of(entry["key"])
    ranked = load_tables(said["device"], tmp_path)[inv.key].ranked
    assert ranked[0].params.variant == "fmha_hopperF_gone"
    found = ConfigSelectorChain(tables=tmp_path).lookup(inv)
    assert (found.step, found.config) == ("shipped", ranked[1])
    assert found.config == load_tables(said["device"])[inv.key].winner.config


def test_tables_name_variants_that_exist(name):
    said = json.loads((FOLDER / f"{name}.json").read_text())
    named = {
        (entry["direction"], params["fields"]["variant"])
        for entry in said["entries"]
        for candidate in entry["candidates"]
        if "variant" in (params := candidate["config"]["fields"]["params"])["fields"]
    }
    known = {(way, variant.name) for way, tables in TABLES.items() for table in tables for variant in table.variants}
    assert {each for each in named if each[1] is not None} <= known


def concrete(kind):
    """A class of params, or its subclasses where it is abstract; of a slotted one an earlier form may be left over."""
    subclasses = [sub for sub in kind.__subclasses__() if getattr(sys.modules[sub.__module__], sub.__name__) is sub]
    return {each for sub in subclasses for each in concrete(sub)} if inspect.isabstract(kind) else {kind}


@pytest.mark.parametrize("op", OPS)
def test_params_have_stable_ids(op):
    """What files hold does not name modules, so that these may be moved."""
    declared = {kind for each in kernel(op).backends.usable for kind in (each.forward_params, each.backward_params)}
    found = {each for kind in declared for each in concrete(kind)}
    assert found
    assert [each for each in found if id_of(each) is None] == []


def test_masks_have_stable_ids():
    found = {each for each in vars(masks).values() if isinstance(each, type) and issubclass(each, masks.Mask)}
    assert len(found) > 6
    assert [each for each in found if not inspect.isabstract(each) and id_of(each) is None] == []


NEWER = (
    "_norm", "matmul", "glu", "_entropy", "_divergence", "rope", "_router", "moe_mlp", "permute", "rope_update_pages",
    "sample", "mla_ragged_page_attention", "linear_attention", "linear_attention_step", "causal_conv1d",
    "causal_conv1d_step", "selective_scan", "selective_scan_step",
)  # fmt: skip


@pytest.mark.parametrize("op", [op for op in OPS if not op.endswith(NEWER)])
def test_labels_of_earlier_programs_find_their_kernels(op):
    """They name the module in which the class stood in version 0.1.0."""
    kind = type(kernel(op))
    assert id_of(kind) == f"tilewright/{op}.{kind.__name__}"
    assert resolve(f"tilewright.kernels.{op}.op:{kind.__name__}") is kind
