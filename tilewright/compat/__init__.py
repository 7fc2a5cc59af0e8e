"""Names of earlier systems that nothing else in the package needs.

`base` has the configuration and the functions of ``tilewright.modules.base``, `paths` the modules that have moved.
"""
