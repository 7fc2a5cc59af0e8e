"""Lets the tests on a GPU use and fill the user's cache of compiled kernels: they take minutes, and have hashes."""

import os

import pytest

from tilewright.ops.utils.folders import cache_folder, make_folder

if os.environ["JAX_PLATFORMS"] != "cpu":
    of_tests = cache_folder("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWRIGHT_CACHE_DIR", os.environ["TILEWRIGHT_USERS_CACHE_DIR"])
        of_user = cache_folder("cuda")
    make_folder(of_user)
    make_folder(of_tests.parent)
    of_tests.symlink_to(of_user, target_is_directory=True)
