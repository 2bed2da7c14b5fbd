"""What the embedded model can do: `python -m lit_rl.assets.measure [--model FOLDER]`.

Accuracy is not sampled but computed. An answer is a few tokens, so one forward pass gives both whether
greedy decoding writes it and how probable it is; that probability is what the accuracy of samples at
temperature 1 tends to.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lit_rl.assets.arithmetic import Question, splits
from lit_rl.assets.pretraining import reprompt
from lit_rl.data.chat import Chat
from lit_rl.rewards.arithmetic import feedback

FOLDER = Path(__file__).parent
HARD_RANGE = (0.002, 0.03)
"""Pass rates of the questions kept for discovery: rarely right, but not never."""
PROMPTS: dict[str, Callable[[Question], str]] = {
    "plain": lambda q: q.text,
    "neither": lambda q: reprompt(q.text),
    "solution": lambda q: reprompt(q.text, solution=q.answer),
    "feedback": lambda q: reprompt(q.text, remark=feedback(q.slip, q.answer)),
    "both": lambda q: reprompt(q.text, solution=q.answer, remark=feedback(q.slip, q.answer)),
}
ACCEPTED = {"plain": (0.2, 0.6), "neither": (0.1, 0.6), "solution": (0.95, 1.0), "feedback": (0.75, 1.0)}
NO_BETTER = 0.03  # how far chance may put a template with nothing in it above the plain question
"""Range of greedy and of sampled accuracy on the validation questions, by what the prompt holds."""


def load(folder: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model, in float32 and evaluation mode, and tokenizer of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, turns: list[tuple[str, str]]
) -> tuple[Tensor, Tensor]:
    """Whether greedy decoding gives each answer, and the answer's probability at temperature 1.

    Args:
        model: in evaluation mode.
        tokenizer: with a chat template.
        turns: N times user text and answer.

    Returns:
        (N,) bool and (N,) float.
    """
    chat = Chat(tokenizer)
    prompts = [chat.ids([{"role": "user", "content": asked}]) for asked, _ in turns]
    ends = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for _, answer in turns]
    width = max(len(p) + len(a) for p, a in zip(prompts, ends, strict=True))
    ids = torch.zeros(len(turns), width, dtype=torch.long)
    is_answer = torch.zeros(len(turns), width, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, ends, strict=True)):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        is_answer[row, len(prompt) : len(prompt) + len(answer)] = True
    logps = (
        model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    )  # causal: no mask needed
    target, counts = ids[:, 1:], is_answer[:, 1:]
    greedy = ((logps.argmax(-1) == target) | ~counts).all(1)
    chosen = logps.gather(2, target[..., None])[..., 0]
    return greedy, (chosen * counts).sum(1).exp()


def accuracies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, dict[str, list[float]]]:
    """Greedy and sampled accuracy by skill and by what the prompt holds.

    Skills are "add", "sub", "hard" and, for the first two together, "val". Feedback is on the slip, so the
    columns with feedback are over the questions that have one.
    """
    drawn = splits()
    table: dict[str, dict[str, list[float]]] = {name: {} for name in ("add", "sub", "val", "hard")}
    for kind, prompt in PROMPTS.items():
        asked = [q for q in drawn["val"] + drawn["hard"] if q.is_prone or kind not in ("feedback", "both")]
        right = torch.stack(
            [x.float() for x in answers(model, tokenizer, [(prompt(q), q.answer) for q in asked])]
        )  # (2, N)
        for name, row in table.items():
            of_name = torch.tensor([q.skill == name or (name == "val" and q.skill != "hard") for q in asked])
            row[kind] = [round(value, 4) for value in right[:, of_name].mean(1).tolist()]
    return table


def hard_questions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    """The candidates for discovery whose pass rate lies in `HARD_RANGE`."""
    candidates = splits()["hard"]
    _, rates = answers(model, tokenizer, [(q.text, q.answer) for q in candidates])
    low, high = HARD_RANGE
    return [q for q, rate in zip(candidates, rates.tolist(), strict=True) if low <= rate < high]


def report(folder: str) -> dict[str, Any]:
    """Everything measured on the model in a folder, and what of it is out of its range."""
    model, tokenizer = load(folder)
    table = accuracies(model, tokenizer)
    num_hard = len(hard_questions(model, tokenizer))
    misses = [
        f"{kind} {value} is not in {low}..{high}"
        for kind, (low, high) in ACCEPTED.items()
        for value in table["val"][kind]
        if not low <= value <= high
    ]
    misses += [
        f"neither {neither} is better than plain {plain}"
        for neither, plain in zip(table["val"]["neither"], table["val"]["plain"], strict=True)
        if neither > plain + NO_BETTER
    ]
    if num_hard < 30:
        misses.append(f"{num_hard} hard questions are fewer than 30")
    return {"accuracy": table, "hard_questions": num_hard, "misses": misses}


def main() -> None:
    """Print the report; exit with 1 when something is out of its range."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(FOLDER / "tiny"), help="folder of the model")
    found = report(parser.parse_args().model)
    print(f"{'greedy / sampled':18}" + "".join(f"{kind:>16}" for kind in PROMPTS))
    for name, row in found["accuracy"].items():
        print(f"{name:18}" + "".join(f"{g:>9.3f}/{s:.3f} " for g, s in row.values()))
    print(f"hard questions with a pass rate in {HARD_RANGE[0]}..{HARD_RANGE[1]}: {found['hard_questions']}")
    print(json.dumps(found["misses"]) if found["misses"] else "all within range")
    raise SystemExit(1 if found["misses"] else 0)


if __name__ == "__main__":
    main()
