"""How far the predictions of two models lie apart, from the likeliest tokens of one of them."""

import torch
from torch import Tensor

LOSSES = ("forward", "reverse", "both")
SMALLEST = 1e-6  # the least probability that is assumed for all tokens outside the likeliest ones


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities, both [n, count], of the likeliest tokens, in any order, for logits [n, vocabulary]."""
    logp, ids = logits.log_softmax(-1).topk(min(count, logits.shape[-1]), sorted=False)
    return ids, logp


def divergence(logits: Tensor, ids: Tensor, logp: Tensor, loss: str = "forward") -> Tensor:
    """The divergence [n], in nats, of predictions from those of a teacher of which the likeliest tokens are known.

    All other tokens count as one, so that the forward divergence is at most that over the whole vocabulary (the data
    processing inequality).

    Args:
        logits: [n, vocabulary], of the student, float32.
        ids, logp: [n, k], the likeliest tokens of the teacher, and their log-probabilities, float32.
        loss: "forward", KL(teacher | student); "reverse", KL(student | teacher); "both", their mean with weights that
            are, for each position, the entropy of the student for the forward one and that of the teacher for the
            reverse one: the less certain model is drawn to the more certain one.

    Source: arXiv:1503.02531 (forward), arXiv:2306.08543 (reverse). BD-KD, arXiv:2212.12965, balances both for each
    sample by the certainty of the two models; these weights are not the paper's.
    """
    student = _with_rest(_LogProbabilities.apply(logits, ids))
    teacher = _with_rest(logp)
    apart = teacher - student
    p, q = teacher.exp(), student.exp()
    if loss == "forward":
        return (p * apart).sum(-1)
    if loss == "reverse":
        return -(q * apart).sum(-1)
    forward, reverse = (p * apart).sum(-1), -(q * apart).sum(-1)
    unsure = -(q * student).sum(-1).detach(), -(p * teacher).sum(-1)  # entropies of the student and of the teacher
    return (unsure[0] * forward + unsure[1] * reverse) / (unsure[0] + unsure[1]).clamp_min(SMALLEST)


class _LogProbabilities(torch.autograd.Function):
    """log softmax(logits)[ids]; the gradient is made in one array of the size of the logits, where torch's own
    operators would make five."""

    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor) -> Tensor:
        logp = logits.log_softmax(-1)
        ctx.save_for_backward(logp, ids)
        return logp.gather(-1, ids)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        logp, ids = ctx.saved_tensors
        by_logits = logp.exp().mul_(-grad.sum(-1, keepdim=True))
        return by_logits.scatter_add_(-1, ids, grad), None


def _with_rest(logp: Tensor) -> Tensor:
    """Log-probabilities [n, k + 1]: those given, and that of all other tokens together."""
    inside = logp.logsumexp(-1, keepdim=True).exp()
    return torch.cat([logp, (1 - inside).clamp_min(SMALLEST).log()], -1)
