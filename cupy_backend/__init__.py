"""The CuPy backend of thdcp, with the signatures of `refimpl`: under construction.

What is there: `host` runs the CUDA kernels of `kernels_cu` on the CPU. This package imports `refimpl`, never the other
way round, and CuPy only where a GPU is used.
"""
