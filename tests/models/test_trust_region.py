"""TrustRegion: logits of the initial and of the current policy, mixed."""

import copy

import pytest
import torch
from tiny_models import make_rows, tiny_llama, tiny_lora

from lit_rl.functional.distillation import source_logps
from lit_rl.models.score import completion_hidden, head_of
from lit_rl.models.trust_region import TrustRegion

ROWS = make_rows((3, 5), (6, 4))
TARGETS = torch.cat([ROWS.completion_ids[0, :5], ROWS.completion_ids[1, :4]])


def logits_of(model):
    with torch.no_grad():
        return completion_hidden(model, ROWS) @ head_of(model).weight.T


@pytest.mark.parametrize("make", [tiny_llama, lambda: tiny_lora(tiny_llama())])
@pytest.mark.parametrize("mix", [0.0, 0.05, 0.6, 1.0])
def test_the_teacher_mixes_logits_of_the_initial_and_the_current_policy(make, mix):
    policy = make().train()
    initial = copy.deepcopy(policy)
    teacher = TrustRegion(policy, mix)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    sources = teacher.sources(ROWS)
    expected = torch.lerp(logits_of(initial), logits_of(policy), mix).log_softmax(-1)
    found = source_logps(sources, TARGETS, chunk_tokens=2)
    torch.testing.assert_close(found, expected.gather(1, TARGETS[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    assert not any(source.hidden.requires_grad for source in sources)
    assert policy.training and all(p.grad is None for p in policy.parameters())
    assert not teacher.is_moving and teacher.state_dict() == {}
