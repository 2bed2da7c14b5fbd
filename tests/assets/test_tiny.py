import hashlib
import json

import pytest
import torch

from lit_rl.assets import tiny_model
from lit_rl.assets.arithmetic import splits
from lit_rl.assets.build import train_command
from lit_rl.assets.measure import FOLDER, HARD_RANGE, answers, hard_questions, load, report
from lit_rl.assets.pretraining import BALANCE, reprompt

TINY = FOLDER / "tiny"


@pytest.fixture(scope="module")
def tiny():
    torch.set_num_threads(1)
    return load(str(TINY))


def test_every_printable_text_survives_the_tokenizer(tiny) -> None:
    _, tokenizer = tiny
    text = (
        "".join(tiny_model.CHARACTERS)
        + "\n\n\nislands attempted, Correctly so is it."
        + reprompt("1+2=?", solution="3")
    )
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.unk_token_id not in tokenizer.encode(text)
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_every_character_is_a_token(tiny) -> None:
    _, tokenizer = tiny
    text = "Correctly solve\n\n47+38=?"
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text)) == list(text)


def test_a_chat_is_roles_contents_and_ends_and_the_end_is_not_the_padding(tiny) -> None:
    model, tokenizer = tiny
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": " b\n"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>a<|end|><|user|> b\n<|end|><|assistant|>"
    assert tokenizer.pad_token_id == 0 and tokenizer.eos_token_id == 1 and tokenizer.bos_token_id is None
    assert model.generation_config.eos_token_id in (1, [1]) and not model.generation_config.do_sample
    with pytest.raises(Exception, match="The role tool is none of"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "a"}])


def test_the_shipped_tokenizer_and_shape_are_what_the_code_makes(tiny, tmp_path) -> None:
    model, tokenizer = tiny
    tiny_model.tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (TINY / name).read_text()
    made, shipped = tiny_model.model_config().to_dict(), model.config.to_dict()
    assert {k: v for k, v in shipped.items() if k not in ("architectures", "dtype", "_name_or_path")} == {
        k: v for k, v in made.items() if k not in ("architectures", "dtype", "_name_or_path")
    }
    assert model.config.vocab_size == len(tokenizer) and model.config.head_dim == 64


def test_the_weights_are_those_that_were_measured() -> None:
    measured = json.loads((TINY / "measured.json").read_text())
    assert hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest() == measured["sha256"]
    assert measured["misses"] == []


def test_the_shipped_model_starts_low_and_knows_better_when_told() -> None:
    found, measured = report(str(TINY)), json.loads((TINY / "measured.json").read_text())
    assert found["misses"] == []
    for kind, values in found["accuracy"]["val"].items():
        assert values == pytest.approx(measured["accuracy"]["val"][kind], abs=5e-3)


def test_computed_accuracy_is_that_of_generation(tiny) -> None:
    model, tokenizer = tiny
    questions = [q for q in splits()["val"] if len(q.text) == 7][:48]
    greedy, probability = answers(model, tokenizer, [(q.text, q.answer) for q in questions])
    chats = [[{"role": "user", "content": q.text}] for q in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )

    def right(**settings) -> torch.Tensor:
        ids = model.generate(**inputs, max_new_tokens=6, **settings)[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        count = len(texts) // len(questions)
        return torch.tensor([t == questions[i // count].answer for i, t in enumerate(texts)])

    assert torch.equal(right(do_sample=False), greedy)
    torch.manual_seed(0)
    sampled = right(do_sample=True, top_k=0, num_return_sequences=32).float().mean()
    error = (probability * (1 - probability) / 32).sum().sqrt() / len(questions)
    assert abs(sampled - probability.mean()) < 4 * error


def test_discovery_questions_are_rarely_right_but_not_never(tiny) -> None:
    model, tokenizer = tiny
    kept = hard_questions(model, tokenizer)
    _, rates = answers(model, tokenizer, [(q.text, q.answer) for q in kept])
    assert len(kept) >= 30
    assert HARD_RANGE[0] <= float(rates.min()) and float(rates.max()) < HARD_RANGE[1]


def test_the_assets_stay_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 10 * 2**20


def test_the_build_runs_the_projects_own_training_in_order(tmp_path) -> None:
    command = train_command(tmp_path, BALANCE._replace(steps=7), tmp_path / "initial")
    assert command[1:4] == ["train.py", "algo=sft", "data=chat_sft"]
    assert {"data.shuffle=false", "trainer.max_steps=7", "checkpoint.save_contents=[model,hf_model]"} <= set(
        command
    )
