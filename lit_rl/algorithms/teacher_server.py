"""The teacher on the rollout server: what it is asked, where the answer goes, what it cannot do."""

from dataclasses import replace

from torch import Tensor

from lit_rl.batch import RolloutBatch
from lit_rl.errors import ConfigError
from lit_rl.objectives.distillation import Distillation
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.scoring import Scores

KEY = "algo.teacher.use_teacher_server"


def check_teacher_server(distillation: Distillation, sampling: Sampling) -> None:
    """Refuse what a server cannot score (source: TRL SDPO, "teacher from the vLLM server").

    Raises:
        ConfigError: a policy term, a whole vocabulary, or another temperature than 1.
    """
    if distillation.distillation_weight != 1.0:
        raise ConfigError(
            f"{KEY} needs {distillation.key}.distillation_weight 1.0 (found "
            f"{distillation.distillation_weight!r}): it leaves the policy term out."
        )
    if distillation.distillation_mode == "full_logits":
        raise ConfigError(
            f"{KEY} needs {distillation.key}.distillation_mode sampled_token or topk_logits (found "
            "'full_logits'): the server does not return a whole vocabulary."
        )
    if sampling.temperature != 1.0:
        raise ConfigError(
            f"{KEY} needs {sampling.key}.temperature 1.0 (found {sampling.temperature!r}): the server scores "
            "given tokens at temperature 1."
        )


def as_the_teacher_reads(rows: RolloutBatch) -> RolloutBatch:
    """The same completions under the teacher's prompts."""
    assert rows.teacher_prompt_ids is not None and rows.teacher_prompt_len is not None
    return replace(
        rows,
        prompt_ids=rows.teacher_prompt_ids,
        prompt_len=rows.teacher_prompt_len,
        images=rows.teacher_images,
    )


def put_scores_(rollout: RolloutBatch, index: Tensor, scores: Scores) -> None:
    """Write the scores of the rows at `index` into the rollout's teacher fields."""
    assert rollout.teacher_logps is not None
    rollout.teacher_logps[index] = scores.logps
    if rollout.teacher_top_ids is not None and rollout.teacher_top_logps is not None:
        rollout.teacher_top_ids[index] = scores.top_ids
        rollout.teacher_top_logps[index] = scores.top_logps
