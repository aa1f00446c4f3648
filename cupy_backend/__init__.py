"""The CuPy backend of thdcp: not implemented yet.

This package will hold the same functions as `refimpl`, with the same signatures, run by the CUDA kernels in
`kernels_cu` and by NCCL. It will import `refimpl`, never the other way round. Until then it defines nothing,
and `make gpu-check` fails and says so.
"""
