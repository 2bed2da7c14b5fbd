"""Images of rows: every form, their places in the prompt, and what is refused."""

import importlib.util
import pickle
from multiprocessing.reduction import ForkingPickler

import datasets
import pytest
import tiny_vlm
import torch

from lit_rl.data.image_chat import ImageChat, ShownImages
from lit_rl.data.images import images_of, places_in, with_parts, with_places
from lit_rl.data.prompts import PromptDataModule
from lit_rl.errors import ConfigError, DataError

PICTURE = tiny_vlm.picture(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_vlm.save_llava(tmp_path_factory.mktemp("llava"))


def module(rows, folder: str, **settings) -> PromptDataModule:
    settings = {"train_batch_size": 2, "val_files": None, "shuffle": False, "tokenizer": folder, **settings}
    data = PromptDataModule(train_files=rows, **settings)
    data.setup("fit")
    return data


def test_an_image_is_the_same_in_every_form(tmp_path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(tiny_vlm.png(PICTURE))
    forms = [
        PICTURE,
        tiny_vlm.png(PICTURE),
        {"bytes": tiny_vlm.png(PICTURE), "path": None},
        {"bytes": None, "path": str(file)},
        str(file),
        file,
        tiny_vlm.data_url(PICTURE),
    ]
    for form in [*forms, forms]:
        assert all(image.tobytes() == PICTURE.tobytes() for image in images_of(form, "row 0"))
    assert images_of(None, "row 0") == [] and len(images_of(forms, "row 0")) == len(forms)


@pytest.mark.parametrize(
    "value",
    [
        7,
        "nowhere.png",
        "https://somewhere/a.png",
        b"no picture",
        {"bytes": None, "path": None},
        "data:image/png;base64,%%",
        tiny_vlm.png(PICTURE)[:60],
    ],
)
def test_what_is_no_image_is_named_with_its_row_and_place(value) -> None:
    with pytest.raises(DataError, match=r"^row 3, column 'images', image 1 "):
        images_of([PICTURE, value], "row 3, column 'images'")


def test_marks_in_text_and_parts_of_messages_are_the_same_places() -> None:
    text = [{"role": "user", "content": "a<image>b"}]
    parts = [{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "image", "text": None}, {"type": "text", "text": "b"},
    ]}]  # fmt: skip
    assert with_parts(text) == with_parts(parts)
    assert with_places(parts) == text and places_in(text) == places_in(parts) == 1


@pytest.mark.parametrize("family", ["llava", "idefics"])
def test_a_prompt_is_what_the_processor_makes_of_it(family: str) -> None:
    processor = getattr(tiny_vlm, f"{family}_processor")()
    prompt = [{"role": "user", "content": "see <image> and <image>?"}]
    pictures = [PICTURE, tiny_vlm.picture(2, (9, 30))]
    found = ImageChat(processor).whole(prompt, pictures, "row 0", "row 0")
    expected = processor(
        text=["<|user|>see <image> and <image>?<|end|><|assistant|>"], images=[pictures], return_tensors="pt"
    )
    assert found.ids == expected["input_ids"][0].tolist()
    assert found.images is not None and found.images.keys() == expected.keys() - {
        "input_ids",
        "attention_mask",
    }
    for name, value in found.images.items():
        assert torch.equal(value, expected[name])


def test_rows_of_parquet_and_of_datasets_come_with_their_tensors(folder: str, tmp_path) -> None:
    rows = tiny_vlm.image_rows(4, every=2)
    as_set = datasets.Dataset.from_list(rows).cast_column("images", datasets.List(datasets.Image()))
    batches = [
        next(iter(module(source, folder).train_dataloader()))
        for source in (rows, tiny_vlm.write_rows(rows, tmp_path / "rows.parquet"), as_set)
    ]
    for batch in batches:
        assert batch.images[1] is None and batch.images[0]["pixel_values"].shape == (1, 3, 16, 16)
        assert torch.equal(batch.prompt_ids, batches[0].prompt_ids)
        assert torch.equal(batch.images[0]["pixel_values"], batches[0].images[0]["pixel_values"])


def test_a_prompt_that_is_text_has_places_too(folder: str) -> None:
    rows = [{"prompt": "<image> is", "images": PICTURE}] * 2
    batch = next(iter(module(rows, folder).train_dataloader()))
    assert batch.prompt_len.tolist() == [8, 8]  # four patches, a class token, and three characters


def test_images_stay_when_unused_columns_go_and_when_workers_read(folder: str, tmp_path) -> None:
    file = tiny_vlm.write_rows(tiny_vlm.image_rows(4), tmp_path / "rows.parquet")
    batch = next(iter(module(file, folder, remove_unused_columns=True).train_dataloader()))
    assert set(batch.columns) == {"prompt", "images"} and all(batch.images)


def test_batches_reach_other_processes_without_an_open_file_for_each_tensor(folder: str) -> None:
    data = module(tiny_vlm.image_rows(4), folder)
    batch = data.first_rows(4)
    sent = bytes(ForkingPickler.dumps(batch.images))
    assert b"rebuild" not in sent
    for own, came in zip(batch.images, pickle.loads(sent), strict=True):
        assert all(torch.equal(own[name], came[name]) for name in own) and own.keys() == came.keys()
    read = pickle.loads(pickle.dumps(data._reader()))  # as a worker that is spawned gets it
    row = tiny_vlm.image_rows(1)[0]
    assert torch.equal(read(row, "row 0").images["pixel_values"], batch.images[0]["pixel_values"])


def test_wrong_counts_name_row_and_columns(folder: str) -> None:
    rows = tiny_vlm.image_rows(4)
    rows[2]["images"] = rows[2]["images"] * 2
    words = r"train_files, row 2, column 'prompt' has 1 places .* column 'images' holds 2"
    with pytest.raises(DataError, match=words):
        module(rows, folder, truncation="error")
    kept = module(rows, folder, on_bad_row="skip")
    assert kept.first_rows(9).prompt_row.tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "image", "image": "a.png"}], "must have parts of the type text"),
        ([{"type": "video"}], "must have parts of the type text"),
        ([{"type": "text"}], "must have parts of the type text"),
        (3, "must have a text 'content'"),
    ],
)
def test_contents_that_are_neither_text_nor_parts_are_refused(folder: str, content, words: str) -> None:
    rows = [{"prompt": [{"role": "user", "content": content}], "images": [PICTURE]}] * 2
    with pytest.raises(DataError, match=rf"row 0, column 'prompt', message 0 {words}"):
        module(rows, folder, truncation="error")


def test_a_template_that_leaves_images_out_is_an_error() -> None:
    processor = tiny_vlm.llava_processor()
    processor.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(DataError, match="writes 0 times '<image>' for 1 images"):
        ImageChat(processor).whole([{"role": "user", "content": "<image>?"}], PICTURE, "row 0", "row 0")


def test_prompts_with_images_are_not_cut(folder: str) -> None:
    rows = tiny_vlm.image_rows(4, every=2)
    with pytest.raises(DataError, match=r"row 0, column 'prompt': the prompt has 15 tokens with its images"):
        next(iter(module(rows, folder, max_prompt_length=12).train_dataloader()))
    kept = module(rows, folder, max_prompt_length=12, filter_overlong_prompts=True)
    assert kept.first_rows(9).prompt_row.tolist() == [1, 3]


def test_a_model_of_text_is_refused_before_anything_else(folder: str) -> None:
    rows = tiny_vlm.image_rows(4)
    data = PromptDataModule(train_files=rows, val_files=None)
    with pytest.raises(ConfigError, match=r"^data\.image_key: .* 'embedded' reads text alone"):
        data.num_rows()
    text = [{**row, "prompt": "q"} for row in rows]
    batch = next(iter(module(text, "embedded", image_key=None).train_dataloader()))
    assert batch.images is None and "images" in batch.columns


def test_a_processor_that_cannot_be_loaded_says_what_is_missing(folder: str, tmp_path) -> None:
    if importlib.util.find_spec("torchvision"):
        pytest.skip("torchvision is there")
    tiny_vlm.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    (tmp_path / "processor_config.json").write_text(
        '{"processor_class": "Qwen2VLProcessor", '
        '"image_processor": {"image_processor_type": "Qwen2VLImageProcessor"}}'
    )
    with pytest.raises(ConfigError, match=r"^data\.image_key: the processor .* not installed: torchvision"):
        module(tiny_vlm.image_rows(4), str(tmp_path))


@pytest.mark.parametrize("family", ["llava", "idefics"])
def test_other_prompts_can_be_written_around_the_same_images(family: str) -> None:
    chat = ImageChat(getattr(tiny_vlm, f"{family}_processor")())
    prompt = [{"role": "user", "content": "a<image>b<image>"}]
    pictures = [PICTURE, tiny_vlm.picture(2, (9, 30))]
    ids = chat.whole(prompt, pictures, "row 0", "row 0").ids
    shown = ShownImages(chat, prompt, pictures, ids)
    longer = [{"role": "user", "content": "a<image>b<image>, and " + shown.verbatim("no <image>")}]
    added = shown.ids(longer)
    assert added[: len(ids) - 2] == ids[:-2] and added[-2:] == ids[-2:]
    assert "no <image>" in chat.tokenizer.decode(added)
    token = chat.processor.image_token_id
    assert added.count(token) == ids.count(token)
    with pytest.raises(ConfigError, match="reads text alone"):
        chat.ids(prompt)
