"""Makes the wheel ``tilewright-kernels-cu13``: compiled groups for machines without nvcc. See ``__main__``."""
