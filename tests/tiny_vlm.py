"""Vision-language models of a few thousand random weights, with processors, and rows with images for them."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lit_rl.assets.tiny_model import tokenizer as text_tokenizer
from lit_rl.batch import RolloutBatch, padded
from lit_rl.data.image_chat import ImageChat
from lit_rl.images import ImageTensors

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|' + message['role'] + '|>' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}{%- else %}"
    "{%- for part in message['content'] %}"
    "{{- '<image>' if part['type'] == 'image' else part['text'] }}{%- endfor %}{%- endif %}"
    "{{- '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def tokenizer() -> Any:
    """The embedded model's characters, and a token for images."""
    own = text_tokenizer()
    own.add_tokens([AddedToken("<image>", special=True, normalized=False)], special_tokens=True)
    own.chat_template = CHAT_TEMPLATE
    return own


def _text(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }


def llava_processor() -> Any:
    """Four patches and a class token for every image."""
    return LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer(),
        patch_size=8,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def llava(seed: int = 0) -> Any:
    """LLaVA: a CLIP tower, a projector, a Llama."""
    torch.manual_seed(seed)
    words = tokenizer()
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=16,
        patch_size=8, initializer_range=0.2,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**_text(len(words))),
        image_token_id=words.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    return LlavaForConditionalGeneration(config).eval()


def idefics_processor() -> Any:
    """One token for every image, between two marks."""
    return Idefics3Processor(
        Idefics3ImageProcessorPil(
            size={"longest_edge": 16}, max_image_size={"longest_edge": 16}, do_image_splitting=False
        ),
        tokenizer(),
        image_seq_len=1,
        chat_template=CHAT_TEMPLATE,
    )


def idefics(seed: int = 0) -> Any:
    """Idefics3: pictures in one tensor for each row, filled up to the most that a row has."""
    torch.manual_seed(seed)
    words = idefics_processor().tokenizer
    config = Idefics3Config(
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 8, "initializer_range": 0.2,
        },
        text_config={"model_type": "llama", **_text(len(words))},
        image_token_id=words.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    return Idefics3ForConditionalGeneration(config).eval()


def qwen(seed: int = 0) -> Any:
    """Qwen2-VL: patches of images of any size, and positions that count through them in three directions."""
    torch.manual_seed(seed)
    words = tokenizer()
    config = Qwen2VLConfig(
        vision_config={
            "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": 0.2,
        },
        text_config={
            **_text(len(words)),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        image_token_id=words.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2VLForConditionalGeneration(config).eval()


def qwen3(seed: int = 0) -> Any:
    """Qwen3-VL: as Qwen2-VL, with features of the tower's layers added in those of the language."""
    torch.manual_seed(seed)
    words = tokenizer()
    config = Qwen3VLConfig(
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0], "initializer_range": 0.2,
        },
        text_config={
            **_text(len(words)),
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
        },
        image_token_id=words.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3VLForConditionalGeneration(config).eval()


def gemma(seed: int = 0) -> Any:
    """Gemma 3: tokens of an image see each other in both directions; windows of eight tokens."""
    torch.manual_seed(seed)
    words = tokenizer()
    config = Gemma3Config(
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4, "initializer_range": 0.2,
        },
        text_config={
            **_text(len(words)),
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        mm_tokens_per_image=4,
        image_token_id=words.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():  # begins at zero, and would show nothing
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.2)
    return model


def gemma_prompt(words: Any, text: str, pictures: Sequence[Any]) -> tuple[list[int], ImageTensors]:
    """Four tokens for every picture, which is made a square of 16; arguments of `qwen_prompt`."""
    ids = words(text.replace("<image>", "<image>" * 4), add_special_tokens=False)["input_ids"]
    squares = [torch.tensor(list(p.resize((16, 16)).tobytes())).view(16, 16, 3) for p in pictures]
    pixels = torch.stack(squares).permute(0, 3, 1, 2) / 127.5 - 1
    kinds = (torch.tensor(ids) == words.convert_tokens_to_ids("<image>")).long()
    return ids, ImageTensors({"pixel_values": pixels, "token_type_ids": kinds})


def qwen_prompt(words: Any, text: str, pictures: Sequence[Any]) -> tuple[list[int], ImageTensors]:
    """What Qwen2-VL's processor makes of a prompt; it cannot be built without torchvision.

    Args:
        words: the tokenizer.
        text: with `<image>` for each picture.
        pictures: of PIL.
    """
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    tensors = dict(images(images=list(pictures), return_tensors="pt"))
    parts, grids = text.split("<image>"), tensors["image_grid_thw"].prod(-1).tolist()
    whole = parts[0] + "".join("<image>" * (n // 4) + part for n, part in zip(grids, parts[1:], strict=True))
    ids = words(whole, add_special_tokens=False)["input_ids"]
    is_image = torch.tensor(ids) == words.convert_tokens_to_ids("<image>")
    return ids, ImageTensors({**tensors, "mm_token_type_ids": is_image.long()})


def picture(seed: int, size: tuple[int, int] = (20, 14)) -> Any:
    """A picture of random colours."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def png(image: Any) -> bytes:
    """The bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def data_url(image: Any) -> str:
    """The picture as a data URL."""
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def image_rows(count: int, *, every: int = 1) -> list[dict[str, Any]]:
    """Rows with one or two pictures each, in verl's form.

    Args:
        count: rows.
        every: only every so many rows have pictures.
    """
    rows = []
    for i in range(count):
        number = 0 if i % every else 1 + i % 2
        content = "what" + "<image>" * number + f" {i}?"
        rows.append(
            {
                "prompt": [{"role": "user", "content": content}],
                "images": [{"bytes": png(picture(10 * i + k)), "path": None} for k in range(number)],
                "data_source": "lit_rl/pictures",
                "reward_model": {"style": "rule", "ground_truth": str(i % 10)},
            }
        )
    return rows


FAMILIES = {"llava": llava, "idefics": idefics, "qwen": qwen, "qwen3": qwen3, "gemma": gemma}
_BY_HAND = {"qwen": qwen_prompt, "qwen3": qwen_prompt, "gemma": gemma_prompt}
TEXTS = ("<|user|>a<image>b<|assistant|>", "<|user|>x<image>y<image>z<|assistant|>", "<|user|>q<|assistant|>")
PICTURES = ([picture(1)], [picture(2), picture(3, (33, 40))], [])


def prompts(family: str) -> RolloutBatch:
    """Three prompts with one picture, two, and none, as the family's processor writes them."""
    found: list[tuple[list[int], ImageTensors | None]] = []
    for text, pictures in zip(TEXTS, PICTURES, strict=True):
        if family in _BY_HAND and pictures:
            found.append(_BY_HAND[family](tokenizer(), text, pictures))
        elif family in _BY_HAND:
            found.append((tokenizer()(text, add_special_tokens=False)["input_ids"], None))
        else:
            chat = ImageChat({"llava": llava_processor, "idefics": idefics_processor}[family]())
            found.append(tuple(chat.whole(text, pictures, "row", "row")))  # type: ignore[arg-type]
    ids, lengths = padded([own for own, _ in found], "left")
    return RolloutBatch(ids, lengths, torch.arange(3), images=[images for _, images in found])


def plain_inputs(rows: RolloutBatch, b: int) -> dict[str, Any]:
    """What transformers takes for one row: prompt and completion, if there is one, and its images."""
    assert rows.images is not None
    width, length = rows.prompt_ids.shape[1], int(rows.prompt_len[b])
    ids = rows.prompt_ids[b, width - length :]
    if rows.completion_ids is not None and rows.completion_len is not None:
        ids = torch.cat([ids, rows.completion_ids[b, : int(rows.completion_len[b])]])
    images = dict(rows.images[b] or {})
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in images:
            images[name] = torch.nn.functional.pad(images[name], (0, len(ids) - length))[None]
    return {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None], **images}


def write_rows(rows: list[dict[str, Any]], file: Path) -> str:
    """A parquet file of these rows."""
    pq.write_table(pa.Table.from_pylist(rows), file)
    return str(file)


def save_llava(folder: Path) -> str:
    """A folder that `from_pretrained` reads, with its processor."""
    llava().save_pretrained(folder)
    llava_processor().save_pretrained(folder)
    return str(folder)
