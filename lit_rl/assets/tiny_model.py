"""Shape and tokenizer of the embedded model, a Llama with 1.1 million parameters.

The vocabulary holds single characters: any printable ASCII text can be written, other characters become
`<unk>`. `<|end|>` ends a turn and a completion; padding has an id of its own.
"""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<unk>"]
CHARACTERS = ["\n", "\t", *(chr(code) for code in range(32, 127))]

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('The role ' + message['role'] + ' is none of system, user, assistant.') }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template, 103 entries."""
    vocabulary = [*SPECIAL_TOKENS, *CHARACTERS]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def model_config() -> LlamaConfig:
    """Hidden 192, three layers, three heads of 64, tied embeddings.

    `initializer_range` is about 1/sqrt(hidden): with Llama's 0.02 the model learns to copy from its prompt
    much later.
    """
    return LlamaConfig(
        vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.07,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
