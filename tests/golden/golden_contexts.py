"""Teacher contexts and GSM8K scores as recorded."""

import hashlib
from typing import Any

import torch

from lit_rl.objectives.reprompt import Reprompt
from lit_rl.rewards.gsm8k import GSM8K, verl_answer
from lit_rl.rewards.reward import Sample

SETTINGS = (
    "success_reward_threshold",
    "dont_reprompt_on_self_success",
    "include_environment_feedback",
    "environment_feedback_only_without_solution",
    "remove_thinking_from_demonstration",
    "use_successful_as_teacher",
)


def teacher_context(case: dict[str, Any]) -> dict[str, Any]:
    """Demonstration, mask and conversation of each row, under the neutral and the default templates."""
    params, inputs = case["params"], case["inputs"]
    settings = {name: params[name] for name in SETTINGS if name in params}
    neutral, default = Reprompt(**settings, **params["templates"]), Reprompt(**settings)
    texts = [neutral.demonstration_text(text) for text in inputs["completions"]]
    success = neutral.is_success(torch.tensor(inputs["rewards"], dtype=torch.float64)).tolist()
    chosen = neutral.demonstrations(success, texts, params["num_generations"])
    shown = [None if i is None else texts[i] for i in chosen]
    feedback = inputs["feedbacks"] or [None] * len(texts)
    rows = list(zip(inputs["prompts"], shown, feedback, strict=True))
    contexts = [neutral.context(*row) for row in rows]
    return {
        "self_distillation_mask": [float(context is not None) for context in contexts],
        "demo_index": chosen,
        "teacher_messages_neutral_templates": [
            prompt if context is None else context
            for context, (prompt, _, _) in zip(contexts, rows, strict=True)
        ],
        "default_template_text_fingerprint": [_fingerprint(default.context(*row) or row[0]) for row in rows],
    }


def gsm8k(case: dict[str, Any]) -> dict[str, Any]:
    """Scores of the verl-compatible methods."""
    inputs = case["inputs"]
    sample = Sample(
        prompt="",
        completion=inputs["response"],
        columns={"reward_model": {"ground_truth": inputs["ground_truth"]}},
    )
    return {
        method: {
            "extracted": verl_answer(inputs["response"], is_strict=method == "strict"),
            "score": GSM8K(method=f"verl_{method}").score(sample).score,
            "score_with_format_0_1": GSM8K(method=f"verl_{method}", format_score=0.1).score(sample).score,
        }
        for method in ("strict", "flexible")
    }


def _fingerprint(prompt: Any) -> dict[str, Any]:
    text = prompt
    if not isinstance(prompt, str):
        text = next(message for message in prompt[::-1] if message["role"] == "user")["content"]
    if not isinstance(text, str):
        return {"unchanged_multipart": True}
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"length": len(text), "sha256": digest, "newlines": text.count("\n")}
