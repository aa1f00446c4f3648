"""The CuPy backend of thdcp, with the signatures of `refimpl`, on a GPU or, for checking, on a CPU.

    device             where arrays lie and kernels run: `HostDevice` (NumPy, `host`) or `CudaDevice` (CuPy, `kernels`)
    partition          partition_indices, partition, unpartition
    metadata           rank_metadata, position_ids, next_token_labels; `device_metadata` without a wait for the device
    attention          attention forward and backward, of buffers and of steps
    collectives        groups on a device: NCCL, or any group of refimpl through host memory
    context_parallel   forward and backward of one rank
    adapter, backends  the backend as `thdcp check --adapter` and `thdcp verify --backend` run it

The kernels are the sources of `kernels_cu`. This package imports `refimpl`, never the other way round, and CuPy only
where a GPU is used: without CuPy or a GPU it imports, and what needs one says what to install.
"""
