"""The estimated loss: the change of the model's predictions, to second order, from gradients and layer errors."""

from collections.abc import Mapping

from torch import Tensor

from compress.allocation.candidates import Solved
from compress.walk.walk import quadratic


class FisherLoss:
    """The `predicted_loss` of the linears that are stored in another form."""

    statistics: tuple[str, ...] = ("gram",)
    sample = 0

    def __init__(self, F: Mapping[str, Tensor]) -> None:
        """
        Args:
            F: squared gradients by the linears' names (`compress.walk.fisher`).
        """
        self.F = F

    def of(self, index: int, solved: Mapping[str, Solved]) -> float:
        total = 0.0
        for name, (new, W, statistics, _) in solved.items():
            if not statistics.tokens:  # an expert that no token reached
                continue
            D = W - new.dequantize()
            total += predicted_loss(D, self.F[name].to(W.device), statistics.values["gram"])
        return total

    def of_end(self, name: str, solved: Solved) -> float:
        return self.of(-1, {name: solved})

    def leave(self, index: int) -> None:
        pass


def predicted_loss(D: Tensor, F: Tensor, H: Tensor) -> float:
    """½ Σ_i G_i · D_i E[x xᵀ] D_iᵀ: an estimate of the KL divergence, in nats per token, for an error D of a weight.

    G_i is the mean squared gradient of the loss with respect to output i of the linear, taken from the weights' squared
    gradients F and their inputs x as Σ_j F_ij / Σ_j E[x_j²]. The Fisher matrix of a linear is approximated by a
    Kronecker product (arXiv:1503.05671) whose factor for the outputs is diagonal. The errors of a row's weights are
    combined, so that an error that later columns compensate has a small loss; Σ F D² would ignore the compensation.

    Args:
        D, F: [out, in].
        H: [in, in], 2 E[x xᵀ].
    """
    G = F.sum(1) / H.diagonal().sum().clamp_min(1e-30)  # [out], half of G_i
    return 0.5 * quadratic(D * G.sqrt()[:, None], H)
