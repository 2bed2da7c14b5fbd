"""What engines outside the training model report: refused when it is not a number, filled in when it is."""

import math

import pytest
import torch

from lit_rl.rollout.completions import Completion, filled
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.vllm_colocate import VLLMColocate, _completion
from lit_rl.rollout.vllm_request import is_policy_distribution, request_seed, request_settings

from .tiny import PAD, prompts_of


class FakeEntry:
    def __init__(self, logprob: float, rank: int) -> None:
        self.logprob, self.rank = logprob, rank


class FakeOutput:
    """An output of vLLM where a more likely token stands before the sampled one."""

    token_ids = (4,)
    logprobs = ({9: FakeEntry(-0.1, 1), 4: FakeEntry(-3.0, 5)},)
    finish_reason = "length"


@pytest.mark.field("vllm/4")
def test_the_log_probability_is_that_of_the_sampled_token() -> None:
    assert _completion(FakeOutput(), True) == Completion([4], [-3.0], "length")


def test_rows_are_padded_and_carry_the_version() -> None:
    rows = filled(
        prompts_of([[5, 6], [7]], prompt_rows=[3, 8]),
        [Completion([4, 1], [-0.5, -0.25], "stop"), Completion([9, 9, 9], [-1.0, -2.0, -3.0], "length")],
        pad_token_id=PAD,
        policy_version=6,
    )
    assert rows.completion_ids.tolist() == [[4, 1, PAD], [9, 9, 9]]
    assert rows.completion_len.tolist() == [2, 3] and rows.policy_version.tolist() == [6, 6]
    assert rows.completion_mask.tolist() == [[True, True, False], [True, True, True]]
    assert rows.rollout_logps.tolist() == [[-0.5, -0.25, 0.0], [-1.0, -2.0, -3.0]]


@pytest.mark.field("vllm/4")
@pytest.mark.parametrize("value", [None, math.nan, -math.inf])
def test_a_missing_log_probability_names_row_and_token(value) -> None:
    with pytest.raises(RuntimeError, match="data row 8 at token 1"):
        filled(
            prompts_of([[7]], prompt_rows=[8]),
            [Completion([4, 1], [-0.5, value], "stop")],
            pad_token_id=PAD,
            policy_version=0,
        )


@pytest.mark.parametrize("completion", [Completion([], None, "stop"), Completion([3], None, "abort")])
def test_an_empty_or_aborted_completion_is_refused(completion: Completion) -> None:
    with pytest.raises(RuntimeError, match="data row 0"):
        filled(prompts_of([[7]]), [completion], pad_token_id=PAD, policy_version=0)


@pytest.mark.field("gen/2")
def test_a_request_names_every_setting_so_that_no_default_leaks_in() -> None:
    settings = request_settings(Sampling(temperature=0.9, stop_token_ids=[7]), [1, 2])
    assert settings["stop_token_ids"] == [1, 2, 7] and settings["ignore_eos"] is True
    assert settings["temperature"] == 0.9 and settings["repetition_penalty"] == 1.0
    assert settings["top_k"] == 0 and settings["top_p"] == 1.0 and settings["min_p"] == 0.0
    ignoring = request_settings(Sampling(ignore_eos=True, stop_token_ids=[7]), [1, 2])
    assert ignoring["stop_token_ids"] == [7]


def test_every_completion_has_a_seed_of_its_own() -> None:
    seeds = {request_seed(0, step, row, g) for step in range(3) for row in range(3) for g in range(3)}
    assert len(seeds) == 27 and all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(0, 1, 2, 3) == request_seed(0, 1, 2, 3) != request_seed(1, 1, 2, 3)


@pytest.mark.parametrize(
    "cut",
    [
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"generation_kwargs": {"min_tokens": 2}},
    ],
)
def test_a_cut_distribution_is_not_the_policys(cut: dict) -> None:
    assert is_policy_distribution(Sampling(temperature=0.5))
    assert not is_policy_distribution(Sampling(**cut))


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "int8"},
        {"gpu_memory_utilization": 0.0},
        {"max_num_seqs": 0},
        {"model_impl": "sglang"},
        {"load_format": "pt"},
        {"engine_kwargs": {"logprobs_mode": "raw_logprobs"}},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict) -> None:
    name = next(iter(settings.get("engine_kwargs", settings)))
    with pytest.raises(ValueError, match=rf"rollout\.engine\.(engine_kwargs\.)?{name}"):
        VLLMColocate(**settings)


def test_torch_tensors_stay_on_the_device_of_the_prompts() -> None:
    rows = filled(prompts_of([[5]]), [Completion([1], None, "stop")], pad_token_id=PAD, policy_version=0)
    assert rows.rollout_logps is None and rows.completion_ids.device == torch.device("cpu")
