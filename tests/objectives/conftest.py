"""The embedded tokenizer and its chat template."""

import pytest
from transformers import AutoTokenizer

from lit_rl.data.chat import Chat
from lit_rl.paths import resolve_model_path


@pytest.fixture(scope="session")
def chat() -> Chat:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("embedded").folder_or_id)
    return Chat(tokenizer, chat_template_kwargs={}, max_prompt_length=None, truncation="error")
