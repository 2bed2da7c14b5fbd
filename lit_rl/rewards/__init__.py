"""Rewards: one verifier per file, each usable without a trainer, and their weighted sum.

| file | what it scores |
| --- | --- |
| `base.py` | nothing itself: `RewardSum` adds several up |
| `reward.py` | nothing itself: `Sample`, `RewardResult`, and `Reward`, the class to write one with |
| `results.py` | nothing itself: what a function returned, checked and brought into one shape |
| `manager.py`, `waiting.py` | nothing themselves: how functions are called, in time and side by side |
| `by_source.py` | picks one of the verifiers below by the row's data source |
| `gsm8k.py` | the number after the last `####` |
| `multiple_choice.py` | the letter in `<answer> </answer>` |
| `arithmetic.py` | a bare number, as the embedded task wants it |
| `exact_match.py` | the text itself |
| `math.py` | the last expression, as mathematics |
| `json_answer.py` | the last JSON value, field by field |
| `pattern.py`, `length.py`, `soft_overlong.py` | the form, the number of tokens |
| `reasoning_gym.py` | the verifier of a procedural task |
| `model.py`, `network.py` | a reward model's number: a sequence classifier, or a class of yours |
| `judge.py` | the grade by a language model behind an OpenAI-compatible endpoint |
| `code.py`, `sandbox.py`, `sandbox_guard.py` | a program against tests, in a sandbox |
| `custom.py` | your own Python function, in verl's or TRL's signature |
| `random.py` | a coin: the control run that must not improve |
"""
