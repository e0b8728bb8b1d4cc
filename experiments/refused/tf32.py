"""Measures convolutions whose inputs have the ten binary digits of TF32.

python experiments/refused/tf32.py
"""

import torch
from recording import Figure, record
from torch import Tensor
from torch.nn import functional

CASES = ((3, 1, 0), (3, 1, 1), (3, 2, 1), (1, 1, 0), (1, 2, 0), (7, 2, 3))
"""Kernel, stride and padding of the report's six accuracy cases."""
SEEDS = 20
DROPPED_BITS = 13
"""Binary digits of float32 that TF32 does not have."""


def rounded(x: Tensor) -> Tensor:
    """Returns float32 numbers rounded to ten binary digits, to nearest."""
    half = 1 << (DROPPED_BITS - 1)
    bits = (x.view(torch.int32) + half) >> DROPPED_BITS << DROPPED_BITS
    return bits.view(torch.float32)


def error(case: tuple[int, int, int], seed: int, digits: str) -> float:
    """Returns the relative L2 distance of a convolution to float64."""
    kernel, stride, padding = case
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 9, 9, generator=generator)
    w = torch.randn(1, 3, kernel, kernel, generator=generator)
    expected = functional.conv2d(x.double(), w.double(), stride=stride, padding=padding)
    if digits == "tf32":
        x = rounded(x)
        w = rounded(w)
    actual = functional.conv2d(x, w, stride=stride, padding=padding)
    return float((actual - expected).norm() / expected.norm())


def main() -> None:
    """Measures and records."""
    torch.set_num_threads(1)
    method = f"relative L2 distance to float64, mean over {SEEDS} seeds of the worst of six cases, smallest, largest"
    figures = []
    for digits, label in (("tf32", "inputs with TF32's digits"), ("float32", "float32")):
        errors = [max(error(case, seed, digits) for case in CASES) for seed in range(SEEDS)]
        mean = sum(errors) / SEEDS
        interval = (min(errors), max(errors))
        text = f"error {mean:.1e} [{interval[0]:.1e}, {interval[1]:.1e}]"
        figures.append(Figure(digits, label, mean, "error", interval, text, method))
    conclusion = (
        "Ten binary digits give errors of 1e-4 to 1e-3. Tensor cores in TF32 and an error below 1e-7 exclude "
        "each other. The digits were rounded on a CPU; no tensor core was used."
    )
    record("tf32", "TF32 and exact convolutions", conclusion, figures)


if __name__ == "__main__":
    main()
