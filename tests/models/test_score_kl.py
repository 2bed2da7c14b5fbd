"""score_kl: the exact KL to a reference and its gradient, as the plain form over all logits has them."""

import pytest
import torch
from tiny_models import make_rows, tiny_llama, tiny_lora

from lit_rl.models.roles import AdapterOff, FrozenCopy, Offloaded
from lit_rl.models.score import score
from lit_rl.models.score_kl import score_kl

LENGTHS = (3, 5), (6, 4)
ROWS = make_rows(*LENGTHS)
TEMPERATURE = 0.7
MAKES = {
    "frozen": (tiny_llama, FrozenCopy),
    "offloaded": (tiny_llama, lambda policy: Offloaded(FrozenCopy(policy))),
    "adapter off": (lambda: tiny_lora(tiny_llama()), AdapterOff),
}


def plain(model) -> torch.Tensor:
    """(N, V) log-probabilities at each completion token, row by row, through the model's own logits."""
    out = []
    for b, (prompt, length) in enumerate(zip(ROWS.prompt_len, ROWS.completion_len, strict=True)):
        start = ROWS.prompt_ids.shape[1] - prompt
        ids = torch.cat([ROWS.prompt_ids[b, start:], ROWS.completion_ids[b, :length]])
        logits = model(input_ids=ids[None]).logits[0]
        out.append((logits[prompt - 1 : -1] / TEMPERATURE).log_softmax(-1))
    return torch.cat(out)


@pytest.mark.parametrize("chunk_tokens", [2, 64])
@pytest.mark.parametrize("name", ["frozen", "offloaded", "adapter off"])
def test_value_and_gradient_are_those_of_the_plain_form(name: str, chunk_tokens: int) -> None:
    make, role = MAKES[name]
    policy = make().double()
    ref = role(policy)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    found = score_kl(policy, ref, ROWS, temperature=TEMPERATURE, chunk_tokens=chunk_tokens)
    with ref.model() as model:
        ref_logps = plain(model)
    logps = plain(policy)
    kl = (logps.exp() * (logps - ref_logps)).sum(-1)
    is_token = torch.arange(ROWS.completion_ids.shape[1]) < ROWS.completion_len[:, None]
    assert kl.min() > 1e-4
    torch.testing.assert_close(found.kl[is_token], kl, rtol=1e-9, atol=1e-10)
    assert not found.kl[~is_token].any()
    scores = score(policy, ROWS, temperature=TEMPERATURE, with_entropy=True)
    torch.testing.assert_close(found.logps, scores.logps, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.entropy, scores.entropy, rtol=1e-9, atol=1e-10)
    ours, theirs = (torch.autograd.grad(x.sum(), parameters, allow_unused=True) for x in (found.kl, kl))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_no_logits_over_the_whole_batch_exist() -> None:
    """The largest tensor that autograd keeps is of one chunk, not of all positions."""
    policy = tiny_llama(vocab_size=3000)
    kept = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        score_kl(policy, FrozenCopy(policy), ROWS, chunk_tokens=2).kl.sum()
    positions = int(ROWS.completion_len.sum())
    assert 3000 * positions not in kept and 3000 * 2 not in kept  # a chunk's are computed again
