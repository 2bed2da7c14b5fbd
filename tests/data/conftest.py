"""A byte-level tokenizer with a chat template, and parquet files of prompts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def byte_tokenizer(
    template: str | None = TEMPLATE, *, pad: str | None = "<|pad|>"
) -> PreTrainedTokenizerFast:
    """One token per byte, and the special tokens of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token=pad)
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    fast.chat_template = template
    return fast


def prompt_row(i: int, text: str | None = None) -> dict[str, Any]:
    """A row in verl's schema whose ground truth is its index."""
    return {
        "data_source": "test/even" if i % 2 == 0 else "test/odd",
        "prompt": [{"role": "user", "content": f"q{i}" if text is None else text}],
        "ability": "count",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i},
    }


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[..., str]:
    """write_parquet(rows, name="train.parquet", row_group_size=...) -> path."""

    def write(rows: list[dict[str, Any]], name: str = "train.parquet", row_group_size: int = 1000) -> str:
        path = tmp_path / name
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
        return str(path)

    return write
