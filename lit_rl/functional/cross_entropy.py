"""Cross-entropy of tokens with label smoothing, from hidden states."""

from torch import Tensor

from lit_rl.functional.logps import Head, at_targets, logits, over_chunks, positions_of_block


def smoothed_nll(hidden: Tensor, head: Head, targets: Tensor, *, smoothing: float) -> Tensor:
    """Cross-entropy with the target `(1 - smoothing) * one_hot + smoothing / V`.

    Written out, `logsumexp(z) - (1 - smoothing) * z[target] - smoothing * mean(z)`. Source: Szegedy et al.,
    Rethinking the Inception Architecture for Computer Vision, arXiv 1512.00567, section 7.

    Args:
        hidden: (N, H). The position that predicts each target.
        head: output head.
        targets: (N,) long.
        smoothing: 0 is the negative log-likelihood; below 1.

    Returns:
        (N,) float32 or better.
    """

    def of_chunk(hidden_chunk: Tensor, targets_chunk: Tensor) -> tuple[Tensor]:
        scores = logits(hidden_chunk, head)  # (chunk, V)
        right = at_targets(scores, targets_chunk)
        return (scores.logsumexp(-1) - (1 - smoothing) * right - smoothing * scores.mean(-1),)

    return over_chunks(of_chunk, (hidden, targets), chunk_tokens=positions_of_block(head))[0]
