"""Print the table of docs/optimizers.md: how far each method, form and dtype is from float64.

python -m tests.measurements.orthogonalization
"""

import itertools

import torch

from tests.support.spectra import error, spectra

SHAPE = 256, 1024
METHODS = "newton-schulz", "polar-express"
DTYPES = torch.float32, torch.bfloat16


def main() -> None:
    """Print it."""
    matrices = dict(spectra(*SHAPE))
    print(f"| method | products in | form | {' | '.join(matrices)} |")
    print("|" + "---|" * (3 + len(matrices)))
    for method, dtype, form in itertools.product(METHODS, DTYPES, ("direct", "gram")):
        errors = [error(matrix, method, dtype, form) for matrix in matrices.values()]
        name = str(dtype).removeprefix("torch.")
        print(f"| `{method}` | {name} | {form} | {' | '.join(f'{each:.0e}' for each in errors)} |")


if __name__ == "__main__":
    main()
