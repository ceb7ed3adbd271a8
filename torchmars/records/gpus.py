"""The peaks of GPUs: dense bfloat16 FLOP/s, from NVIDIA's data sheets."""

GIB = 2**30

# The sheet, the figure, which it prints twice as large for sparse matrices, and the GPUs.
SHEETS = [
    ("A100, 2021", 312e12, "A100-SXM4-40GB, A100-SXM4-80GB, A100-PCIE-40GB, A100 80GB PCIe"),
    ("A800, 2022", 312e12, "A800-SXM4-80GB, A800 80GB PCIe"),
    ("A10, 2021", 125e12, "A10"),
    ("A10G, of AWS, 2022", 70e12, "A10G"),
    ("A30, 2021", 165e12, "A30"),
    ("A40, 2021", 149.7e12, "A40"),
    ("L4, 2023", 121e12, "L4"),
    ("L40, 2023", 181e12, "L40"),
    ("L40S, 2023", 362e12, "L40S"),
    ("H100, 2024; H200, 2024; H800, 2023: SXM", 989e12, "H100 80GB HBM3, H200, H800"),
    ("H100, 2024; H800, 2023: PCIe", 756e12, "H100 PCIe, H800 PCIe"),
    ("H100, 2024; H200, 2024: NVL", 835e12, "H100 NVL, H200 NVL"),
    ("GH200, 2024", 989e12, "GH200 120GB, GH200 480GB, GH200 144G HBM3e"),
    ("HGX H20, 2023, as SemiAnalysis printed it", 148e12, "H20"),
    ("HGX B200 and B300, 2025: an eighth", 2250e12, "B200, B300 SXM6 AC"),
    ("GB200 and GB300 NVL72, 2025: a 72nd", 2500e12, "GB200, GB300"),
]
# By the whole name that CUDA gives. A slice of a GPU has a longer one, and no known peak.
PEAK_FLOPS = {f"NVIDIA {gpu}": flops for _, flops, gpus in SHEETS for gpu in gpus.split(", ")}
