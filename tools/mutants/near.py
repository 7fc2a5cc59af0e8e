"""The tests near a defect: those named after its place come first, then those around them."""

from pathlib import Path, PurePosixPath

from tools.mutants.defects import ROOT, Defect
from tools.mutants.plugin import Plan

NAMES = {"hopper": ("hopper", "pallas")}
"""What files of tests call a backend, other than by its name."""

SHARED = {
    "hopper": "tests/kernels/hopper", "triton": "tests/kernels/triton", "cuda": "tests/kernels/cuda",
}  # fmt: skip
"""The tests of what the backends of one platform share."""

DEAREST = 30.0
"""Seconds of the dearest test that is run for one defect; the others are for those that survive."""


def places(defect: Defect, root: Path = ROOT) -> list[list[str]]:
    """The files and folders of tests, nearest first: named after the place, around it, of all ops, all.

    The tests of ``tilewright/kernels/<op>/<backend>/file.py`` are ``tests/kernels/<op>/*<backend>*``.
    """
    parts = PurePosixPath(defect.file).with_suffix("").parts[1:]
    folders = ["/".join(("tests", *parts[:count])) for count in range(len(parts), 0, -1)]
    folders = [folder for folder in folders if (root / folder).is_dir()]
    stages = []
    if folders:
        words = [word for part in parts[len(folders[0].split("/")) - 1 :] for word in NAMES.get(part, (part,))]
        words += [word for word in NAMES.get(defect.backend, (defect.backend,)) if word and word not in words]
        inside = sorted(file.relative_to(root).as_posix() for file in (root / folders[0]).rglob("test_*.py"))
        stages.append([file for file in inside if any(word in PurePosixPath(file).stem for word in words)])
        stages.append([folders[0]])
        stages.append([SHARED[part] for part in parts if part in SHARED])
    if parts[0] == "kernels":
        stages.append(["tests/every_op"])
    else:
        stages += [[folder] for folder in folders[1:]]
    return [stage for stage in stages if stage]


def plan(defect: Defect, known: dict[str, float], *, all_tests: bool = False) -> Plan:
    """The tests near a defect; or those of the whole repository, nearest first, without a limit on their costs."""
    near = tuple(map(tuple, places(defect)))
    if all_tests or not near:
        return Plan((*near, ("tests",)), known)
    return Plan(near, known, dearest=DEAREST, limit=900.0)
