"""Muon in float32: momentum whose matrix is brought to orthogonal columns before it is applied.

Published by K. Jordan and others (2024). It needs far fewer batches than AdamW, and batches are what a CPU has few of.
torch's own works in bfloat16, which takes ten times the head's own pass on a CPU without bfloat16 products.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic whose iteration pulls singular values towards 1."""
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """For matrices only; norms and biases belong to another optimiser."""

    def __init__(
        self, parameters: Iterable[Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalised(parameter.grad.lerp(momentum, group["momentum"]))
                # Tall matrices change by the same share per output row as square ones.
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.t() if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.t() if is_tall else x
