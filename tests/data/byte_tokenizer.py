"""A tokenizer without a download: one token per byte, and the special tokens of a chat template."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|start|>"]


def byte_tokenizer(
    template: str | None = TEMPLATE, *, pad: str | None = "<|pad|>", bos: str | None = None
) -> PreTrainedTokenizerFast:
    """One token per byte.

    Args:
        template: chat template; None leaves it without.
        pad: the padding token.
        bos: the start token, which a text tokenized with special tokens begins with.
    """
    vocabulary = {
        token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if bos is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token=pad, bos_token=bos
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    fast.chat_template = template
    return fast
