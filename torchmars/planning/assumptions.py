"""The cluster that plans assume: H100s, eight on a machine, and a good network."""

from torchmars.records.gpus import GIB, GPUS

GPU = GPUS["H100"]
RESERVED = 8 * GIB  # of each GPU: CUDA, NCCL and a fragmented allocator
MEMORY = GPU.memory_gib * GIB - RESERVED  # the rest of it
FLOPS = 400e12  # per second, that the training of large models reaches in bfloat16
NETWORK = 50e9  # bytes per second of each GPU between machines: 400 Gb/s
NVLINK = 350e9  # bytes per second of each GPU within a machine, that collectives reach
SPEEDS = (  # in words
    f"{FLOPS / 1e12:.0f} TFLOP/s of each GPU, {NVLINK / 1e9:.0f} GB/s within a machine and "
    f"{NETWORK / 1e9:.0f} GB/s between machines"
)
PER_NODE = 8  # GPUs of a machine
