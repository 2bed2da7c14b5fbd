"""Data sets as parquet files in verl's schema: `python -m lit_rl.data.prepare gsm8k`.

| source | raw rows |
| --- | --- |
| `gsm8k` | `question`, `answer` with `#### number`; from the hub, or `--train`, `--test` |
| `math` | `problem`, `solution` with `\\boxed{}`; likewise |
| `sciknoweval` | `question`, `choices`, `answerKey`, `domain`; from `--train`, `--test` |
| `jsonl` | your own lines, or parquet: `--prompt` and `--answer` name the columns |
| `reasoning_gym:TASK` | made on the spot by the package reasoning-gym |

`rows.py` makes a row of a raw one, `files.py` reads and writes.
"""
