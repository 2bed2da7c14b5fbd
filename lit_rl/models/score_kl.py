"""Log-probabilities of completions and the exact KL to a reference, from one pass through each model."""

from typing import NamedTuple

from torch import Tensor, nn

from lit_rl.batch import length_mask
from lit_rl.functional.kl import token_logps_and_kl
from lit_rl.models.roles import Role
from lit_rl.models.score import Rows, completion_hidden, head_of, lasting_head_of


class KLScores(NamedTuple):
    """What `score_kl` returns, (B, T) each; 0 at padding.

    Attributes:
        logps: log-probability of each completion token under the policy.
        entropy: in nats, of the policy's distribution there.
        kl: KL(policy || reference) of the two distributions there.
    """

    logps: Tensor
    entropy: Tensor
    kl: Tensor


def score_kl(
    policy: nn.Module,
    ref: Role,
    rows: Rows,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
    entropy_gradient: bool = False,
) -> KLScores:
    """As `score`, and the exact KL at each completion token. Differentiable in the policy's parameters.

    Logits over the vocabulary exist for `chunk_tokens` positions at a time, forward and backward.

    Args:
        policy: a Hugging Face causal language model, or a PEFT model around one.
        ref: the reference, of the same vocabulary.
        rows: prompts and completions.
        temperature: > 0. Both models' logits are divided by it.
        chunk_tokens: positions whose logits exist at once.
        entropy_gradient: let gradients through the entropy too.
    """
    with ref.model() as model:
        ref_hidden = completion_hidden(model, rows)
        ref_head = lasting_head_of(model)
    is_token = length_mask(rows.completion_len, rows.completion_ids.shape[1])  # (B, T)
    flat = token_logps_and_kl(
        completion_hidden(policy, rows),
        head_of(policy),
        ref_hidden,
        ref_head,
        rows.completion_ids[is_token],
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        entropy_gradient=entropy_gradient,
    )
    return KLScores(*(values.new_zeros(is_token.shape).masked_scatter(is_token, values) for values in flat))
