"""Defects planted in copies of the code, one at a time, to see which suite of tests catches each.

``defects/*.toml`` has them, ``verdicts.json`` what catches each. ``python -m tools.mutants`` brings the verdicts up to
date; CONTRIBUTING.md says when to run it.
"""
