"""References and teachers: the right weights, no graph, and state that comes back bit for bit."""

import copy

import pytest
import torch
from tiny_models import make_rows, tiny_gpt2, tiny_llama, tiny_lora

from lit_rl.errors import ConfigError
from lit_rl.models.load import LoRA, load_policy
from lit_rl.models.roles import (
    AdapterOff,
    AveragedCopy,
    FrozenCopy,
    Live,
    MovingReference,
    Offloaded,
    reference_of,
)
from lit_rl.models.score import score
from lit_rl.models.weights import base_of, base_tensors

ROWS = make_rows((3, 5), (6, 4))


def logps_of(role):
    with role.model() as model:
        return score(model, ROWS).logps


def disturb_(policy, seed=3, std=0.05):
    """What training does: every trainable parameter moves."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += std * torch.randn_like(parameter)


ROLES = {
    "frozen": (tiny_llama, FrozenCopy),
    "frozen over adapters": (lambda: tiny_lora(tiny_llama(), b_std=0.1), FrozenCopy),
    "adapter off": (lambda: tiny_lora(tiny_llama()), AdapterOff),
    "live": (tiny_llama, Live),
    "averaged": (tiny_llama, AveragedCopy),
    "averaged adapters": (lambda: tiny_lora(tiny_llama()), AveragedCopy),
}


@pytest.mark.field("mem/5")
@pytest.mark.parametrize("name", ROLES)
def test_a_role_scores_as_the_policy_did_without_graph_and_leaves_the_policy_alone(name):
    make, build = ROLES[name]
    policy = make().train()
    policy.get_input_embeddings().eval()  # a mode of its own, to be put back
    modes = [m.training for m in policy.modules()]
    trains = [p.requires_grad for p in policy.parameters()]
    expected = score(policy, ROWS).logps
    role = build(policy)
    with role.model() as model:
        assert not any(m.training for m in model.modules())
        logps = score(model, ROWS).logps
    assert not logps.requires_grad
    torch.testing.assert_close(logps, expected, atol=2e-5, rtol=0)
    assert [m.training for m in policy.modules()] == modes
    assert [p.requires_grad for p in policy.parameters()] == trains
    expected.sum().backward()  # a pass of the role between forward and backward does no harm
    assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)
    if name not in ("live", "adapter off"):
        with role.model() as model:
            assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ROLES)
def test_only_the_live_role_follows_the_policy(name):
    make, build = ROLES[name]
    policy = make()
    role = build(policy)
    before = logps_of(role)
    disturb_(policy)
    is_equal = torch.equal(logps_of(role), before)
    assert is_equal != (name == "live")
    assert role.is_moving == name.startswith("averaged")
    assert bool(role.state_dict()) == role.is_moving


@pytest.mark.field("num/8")
def test_the_reference_of_a_new_policy_is_the_policy(tmp_path):
    tiny_gpt2(attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1).save_pretrained(tmp_path)
    for lora in (None, LoRA(lora_rank=2, peft_kwargs={"fan_in_fan_out": True})):
        policy = load_policy(str(tmp_path), lora=lora)
        reference = reference_of(policy)
        assert isinstance(reference, AdapterOff if lora else FrozenCopy)
        assert torch.equal(logps_of(reference), score(policy, ROWS).logps)


@pytest.mark.field("ckpt/10")
def test_the_reference_of_a_trained_adapter_has_that_adapter():
    policy = tiny_lora(tiny_llama(), b_std=0.2)
    initial = score(policy, ROWS).logps.detach()
    reference = reference_of(policy)
    assert isinstance(reference, FrozenCopy)
    assert torch.equal(logps_of(reference), initial)
    disturb_(policy)
    assert torch.equal(logps_of(reference), initial)
    assert not torch.equal(score(policy, ROWS).logps, initial)
    with reference.model() as model:
        assert base_of(model).lm_head.weight is base_of(policy).lm_head.weight  # the base model is there once


def test_a_reference_may_be_read_from_elsewhere(tmp_path):
    other = tiny_llama(num_hidden_layers=1)
    other.save_pretrained(tmp_path / "other")
    reference = reference_of(tiny_llama(), str(tmp_path / "other"))
    torch.testing.assert_close(logps_of(reference), score(other, ROWS).logps)
    tiny_llama(vocab_size=60).save_pretrained(tmp_path / "larger")
    with pytest.raises(ConfigError, match=r"algo\.ref\.path must have the policy's vocabulary of 50"):
        reference_of(tiny_llama(), str(tmp_path / "larger"))


def test_adapters_that_do_not_train_still_do_not_after_scoring():
    policy = tiny_lora(tiny_llama())
    frozen = next(p for n, p in policy.named_parameters() if "lora_A" in n).requires_grad_(False)
    logps_of(AdapterOff(policy))
    assert not frozen.requires_grad


def constant_(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values_of(role):
    with role.model() as model:
        return torch.cat([p.float().flatten() for p in model.parameters()])


@pytest.mark.field("sdpo/2")
def test_rates_go_the_right_way_round():
    policy = tiny_llama()
    constant_(policy, 0.0)
    teacher, reference = AveragedCopy(policy), MovingReference(policy)
    constant_(policy, 1.0)
    teacher.move_(0.0)
    assert not values_of(teacher).any()
    teacher.move_(0.05)
    torch.testing.assert_close(values_of(teacher), torch.full_like(values_of(teacher), 0.05))
    teacher.move_(0.05)
    teacher.move_(0.05)
    torch.testing.assert_close(values_of(teacher), torch.full_like(values_of(teacher), 0.142625))
    teacher.move_(1.0)
    assert (values_of(teacher) == 1).all()
    assert not reference.is_moving
    reference.mix_(0.6)
    torch.testing.assert_close(values_of(reference), torch.full_like(values_of(reference), 0.6))
    assert reference.is_moving and reference.state_dict()


@pytest.mark.field("sdpo/3")
def test_an_average_of_bfloat16_weights_moves():
    policy = tiny_llama().bfloat16()
    constant_(policy, 1.0)
    teacher = AveragedCopy(policy)
    constant_(policy, 1.0078125)
    for _ in range(200):
        teacher.move_(0.05)
    for average in teacher.state_dict().values():
        assert average.dtype == torch.float32
        assert (average - 1.0078125).abs().max() < 1e-4
    assert (values_of(teacher) == 1.0078125).all()


@pytest.mark.field("sdpo/3")
def test_an_average_at_a_small_rate_is_exact():
    policy = tiny_llama(num_hidden_layers=1, hidden_size=16, intermediate_size=8)
    constant_(policy, 1.0)
    teacher = AveragedCopy(policy)
    constant_(policy, 1.01)
    for _ in range(2000):
        teacher.move_(0.001)
    assert (values_of(teacher) - (1.01 - 0.01 * 0.999**2000)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_over_adapters_is_one_of_effective_weights(dtype):
    policy = tiny_lora(tiny_llama().to(dtype))
    teacher = AveragedCopy(policy)
    exact = {t.name: t.tensor.double() for t in base_tensors(policy) if t.is_moving}
    for step in range(100):
        disturb_(policy, seed=step, std=0.02)
        teacher.move_(0.05)
        for tensor in base_tensors(policy):
            if tensor.is_moving:
                exact[tensor.name].lerp_(tensor.tensor.double(), 0.05)
    averages = teacher.state_dict()
    now = {t.name: t.tensor for t in base_tensors(policy)}
    assert averages.keys() == exact.keys()
    for name, average in averages.items():
        assert (average.double() - exact[name]).norm() / exact[name].norm() < 1e-5
        assert (average - now[name]).norm() > 1e-3  # it lags behind
    with teacher.model() as model:
        assert model.lm_head.weight is base_of(policy).lm_head.weight  # shared, not copied


@pytest.mark.parametrize(
    "make", [tiny_llama, lambda: tiny_llama().bfloat16(), lambda: tiny_lora(tiny_llama())]
)
def test_an_averaged_copy_comes_back_bit_for_bit(make):
    policy = make()
    teacher = AveragedCopy(policy)
    for step in range(3):
        disturb_(policy, seed=step)
        teacher.move_(0.3)
    state = copy.deepcopy(teacher.state_dict())
    again = AveragedCopy(make())
    again.load_state_dict(state)
    assert all(torch.equal(again.state_dict()[name], state[name]) for name in state)
    assert torch.equal(logps_of(again), logps_of(teacher))


@pytest.mark.parametrize(
    "make", [tiny_llama, lambda: tiny_llama().bfloat16(), lambda: tiny_lora(tiny_llama(), b_std=0.1)]
)
def test_a_mixed_reference_comes_back_bit_for_bit(make):
    policy = make()
    reference = MovingReference(policy)
    disturb_(policy)
    reference.mix_(0.6)
    again = MovingReference(make())
    again.load_state_dict({})
    assert not again.is_moving
    again.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert again.is_moving and torch.equal(logps_of(again), logps_of(reference))


@pytest.mark.parametrize("b_std", [0.0, 0.1])
def test_a_reference_over_adapters_mixes_what_the_layers_compute(b_std):
    """Mixing the factors would not do: 0.6 B A + 0.4 B' A' is no product of mixed factors."""
    policy = tiny_lora(tiny_llama(), b_std=b_std)
    before = {t.name: t.tensor.double() for t in base_tensors(policy)}
    reference = reference_of(policy, moves=True)
    initial = score(policy, ROWS).logps.detach()
    torch.testing.assert_close(logps_of(reference), initial, atol=2e-5, rtol=0)
    disturb_(policy)
    assert torch.equal(
        logps_of(reference), logps_of(reference_of(tiny_lora(tiny_llama(), b_std=b_std), moves=True))
    )
    reference.mix_(0.6)
    after = {t.name: t.tensor.double() for t in base_tensors(policy)}
    with reference.model() as model:
        for name, weight in model.named_parameters():
            expected = 0.6 * after[name] + 0.4 * before[name]
            torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-6)
        assert model.lm_head.weight is base_of(policy).lm_head.weight  # what never trains is there once


def test_small_moves_of_a_bfloat16_reference_are_not_lost():
    policy = tiny_llama(num_hidden_layers=1).bfloat16()
    constant_(policy, 1.0)
    reference = MovingReference(policy)
    constant_(policy, 1.0078125)  # the next bfloat16 number: a move of 0.05 towards it is below the spacing
    for _ in range(200):
        reference.mix_(0.05)
    assert (values_of(reference) == 1.0078125).all()


def test_a_reference_from_elsewhere_can_be_mixed_where_it_has_the_policy_s_shape(tmp_path):
    policy, other = tiny_lora(tiny_llama()), tiny_llama()
    constant_(other, 0.25)
    other.save_pretrained(tmp_path / "other")
    reference = reference_of(policy, str(tmp_path / "other"), moves=True)
    assert (values_of(reference) == 0.25).all() and not reference.is_moving
    reference.mix_(0.5)
    now = {t.name: t.tensor for t in base_tensors(policy)}
    with reference.model() as model:
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weight, 0.5 * now[name].float() + 0.125)
    tiny_llama(num_hidden_layers=1).save_pretrained(tmp_path / "smaller")
    with pytest.raises(ConfigError, match=r"algo\.ref\.path must have the policy's architecture"):
        reference_of(tiny_llama(), str(tmp_path / "smaller"), moves=True)


@pytest.mark.parametrize("make", [tiny_llama, lambda: tiny_lora(tiny_llama(), b_std=0.1)])
@pytest.mark.parametrize("moves", [False, True])
def test_an_offloaded_reference_rests_elsewhere_and_leaves_the_policy_where_it_is(make, moves):
    policy = make()
    expected = score(policy, ROWS).logps.detach()
    inner = reference_of(policy, moves=moves)
    role = Offloaded(inner)
    inner.to_(torch.float64)  # stands in for another device
    with inner.model() as model:
        own = {id(p) for p in model.parameters()} - {id(p) for p in policy.parameters()}
        assert own
        assert all((p.dtype == torch.float64) == (id(p) in own) for p in model.parameters())
    assert all(p.dtype == torch.float32 for p in policy.parameters())
    inner.to_(torch.float32)
    moved = []
    inner.to_ = moved.append
    role.to_("cuda")
    assert moved == []
    torch.testing.assert_close(logps_of(role), expected, atol=2e-5, rtol=0)
    assert moved == ["cuda", "cpu"]


def test_a_state_of_another_role_is_refused():
    state = AveragedCopy(tiny_llama()).state_dict()
    for role in (AveragedCopy(tiny_lora(tiny_llama())), AdapterOff(tiny_lora(tiny_llama()))):
        with pytest.raises(ConfigError, match="names on one side only"):
            role.load_state_dict(state)


def test_roles_work_beside_gradient_checkpointing(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), gradient_checkpointing=True, lora=LoRA(lora_rank=2))
    teacher, reference = AveragedCopy(policy), reference_of(policy)
    logps = score(policy, ROWS).logps
    for role in (teacher, reference):
        assert not logps_of(role).requires_grad
    logps.sum().backward()
    assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)
