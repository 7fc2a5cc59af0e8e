"""Lets the tests on a GPU use and fill the user's cache of compiled kernels: they take minutes, and name what they hold."""

import os

from tilewright.ops.utils.folders import cache_folder, make_folder

if os.environ["JAX_PLATFORMS"] != "cpu":
    own = cache_folder("cuda")
    os.environ["TILEWRIGHT_CACHE_DIR"], tests_cache = (
        os.environ["TILEWRIGHT_USERS_CACHE_DIR"],
        os.environ["TILEWRIGHT_CACHE_DIR"],
    )
    shared = cache_folder("cuda")
    os.environ["TILEWRIGHT_CACHE_DIR"] = tests_cache
    make_folder(shared)
    make_folder(own.parent)
    own.symlink_to(shared, target_is_directory=True)
