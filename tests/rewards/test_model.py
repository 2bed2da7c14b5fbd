"""Reward models: transformers' own scores, whatever stands beside a row; texts in the model's form."""

from pathlib import Path

import pytest
import torch
from tiny_parts import tiny_reward_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lit_rl.errors import ConfigError
from lit_rl.rewards.base import RewardSum
from lit_rl.rewards.model import RewardModel
from lit_rl.rewards.network import SequenceClassifier
from lit_rl.rewards.reward import Sample

TURNS = [
    {"role": "user", "content": "3+4="},
    {"role": "assistant", "content": "8"},
    {"role": "user", "content": "again"},
]
OTHER = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier whose padding is the end token, which chats are full of."""
    return tiny_reward_model(tmp_path_factory.mktemp("reward_model"))


def plain(folder: Path, ids: list[int]) -> float:
    """transformers' score of one row, at its last token."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = None
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


def rollout(prompt: list[int], completion: list[int]) -> Sample:
    return Sample("q", "a", completion, prompt_ids=prompt)


@pytest.mark.field("rew/5")
def test_a_score_is_transformers_and_does_not_depend_on_the_rows_beside_it(folder: Path) -> None:
    end = 1
    rows = [[5, 6, 7, end], [5, end, 9, 10, 11, 12, 13, 14, end], [*range(20, 36), end], [8, end, end]]
    samples = [rollout(row[:2], row[2:]) for row in rows]
    reward = RewardModel(enable=True, path=str(folder)).reward()
    wanted = [plain(folder, row) for row in rows]
    together = [result.score for result in reward(samples)]
    alone = [reward.score(sample).score for sample in samples]
    assert together == pytest.approx(wanted, abs=1e-5) and alone == pytest.approx(wanted, abs=1e-5)
    assert max(wanted) - min(wanted) > 0.01


@pytest.mark.parametrize("side", ["left", "right"])
def test_both_padding_sides_give_what_transformers_gives_with_them(
    folder: Path, side: str, tmp_path: Path
) -> None:
    own = tiny_reward_model(tmp_path / side, pad=0, padding_side=side)
    tokenizer = AutoTokenizer.from_pretrained(own)
    assert tokenizer.padding_side == side
    texts = ["3+4=7", "1+1=3 no", "12+13=25, and that is so"]
    model = AutoModelForSequenceClassification.from_pretrained(own).eval()
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        wanted = model(**ids, position_ids=positions).logits[:, 0].tolist()
    reward = RewardModel(enable=True, path=str(own), micro_batch_size=2).reward()
    scores = [result.score for result in reward([Sample(text[:4], text[4:]) for text in texts])]
    assert scores == pytest.approx(wanted, abs=1e-5)


def test_a_vocabulary_without_a_spare_id_is_scored_row_by_row(folder: Path) -> None:
    network = SequenceClassifier(str(folder))
    size = network.model.config.vocab_size
    rows = [list(range(size)), [5, 6, 7]]
    scores = network.scores(rows, torch.device("cpu")).tolist()
    assert scores == pytest.approx([plain(folder, row) for row in rows], abs=1e-5)


@pytest.mark.field("rew/5")
def test_another_template_or_tokenizer_is_found_and_the_text_rendered_anew(
    folder: Path, tmp_path: Path
) -> None:
    other = tiny_reward_model(tmp_path / "other", template=OTHER)
    sample = Sample(TURNS, "7", [9, 1], prompt_ids=[5, 6, 7])
    own = AutoTokenizer.from_pretrained(other)
    text = f"u: 3+4={own.eos_token}a: 8{own.eos_token}u: again{own.eos_token}a: 7{own.eos_token}"
    rendered = own(text, add_special_tokens=False)["input_ids"]
    anew = RewardModel(enable=True, path=str(other), input_tokenizer=str(folder)).reward()
    assert anew.ids(sample) == rendered
    assert anew.score(sample).score == pytest.approx(plain(other, rendered), abs=1e-5)
    for same in (str(other), None):
        reward = RewardModel(enable=True, path=str(other), input_tokenizer=same).reward()
        assert reward.network is not None and reward.ids(sample) == [5, 6, 7, 9, 1]
    borrowed = RewardModel(
        enable=True, path=str(folder), tokenizer=str(other), input_tokenizer=str(folder)
    ).reward()
    assert borrowed.network is not None and borrowed.ids(sample) == rendered


def test_the_end_of_a_long_row_is_what_counts(folder: Path) -> None:
    reward = RewardModel(enable=True, path=str(folder), max_length=4).reward()
    long, short = rollout([5, 6, 7, 8], [9, 10, 1]), rollout([8], [9, 10, 1])
    results = reward([long, short])
    assert results[0].score == pytest.approx(results[1].score, abs=1e-6)
    assert [result.metrics["truncated_frac"] for result in results] == [1.0, 0.0]


def test_it_is_one_more_function_of_the_sum_under_either_manager(folder: Path) -> None:
    settings = RewardModel(enable=True, path=str(folder))
    sample = Sample("3+4=", "7")
    wanted = settings.reward().score(sample).score
    for manager in ("naive", "prime"):
        own = RewardSum(None, [0.5], reward_model=settings, reward_manager=manager)
        assert own.names == ["reward_model"]
        assert own([sample]).rewards.tolist() == pytest.approx([0.5 * wanted], abs=1e-6)


CUSTOM = """
import torch
from lit_rl.rewards.network import RewardNetwork, SequenceClassifier

class Squashed(SequenceClassifier):
    def scores(self, rows, device):
        return super().scores(rows, device).sigmoid()

class Length(RewardNetwork):
    def __init__(self, path, *, tokenizer, trust_remote_code):
        self.model, self.tokenizer = torch.nn.Identity(), lambda text: {"input_ids": list(text)}
    def scores(self, rows, device):
        return torch.tensor([float(len(row)) for row in rows])

class Wrong:
    pass
"""


def test_a_class_of_yours_scores_by_path(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CUSTOM)

    def score(name: str) -> float | None:
        own = {"path": str(file), "name": name}
        return RewardModel(enable=True, path=str(folder), custom_cls=own).reward().score(sample).score

    sample = rollout([5, 6], [7, 1])
    logit = torch.tensor(plain(folder, [5, 6, 7, 1]))
    assert score("Squashed") == pytest.approx(float(logit.sigmoid()), abs=1e-6)
    assert score("Length") == 4.0
    with pytest.raises(
        ConfigError, match=r"custom_cls\.name must be a class of .*RewardNetwork .found 'Wrong'"
    ):
        score("Wrong")


@pytest.mark.field("rew/5")
def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    two = tiny_reward_model(tmp_path / "two", labels=2)
    with pytest.raises(ConfigError, match=r"reward\.reward_model\.path .*one label .found 2"):
        SequenceClassifier(str(two))
    with pytest.raises(ConfigError, match=r"reward\.reward_model\.path .*no such file"):
        SequenceClassifier("no/such/folder/at all")
    one = tiny_reward_model(tmp_path / "one")
    causal = tmp_path / "causal"
    config = AutoModelForSequenceClassification.from_pretrained(one).config
    AutoModelForCausalLM.from_config(config).save_pretrained(causal)
    with pytest.raises(ConfigError, match=r"trained classifier .*without the weights score"):
        SequenceClassifier(str(causal))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch_size": 0}, "reward.reward_model.micro_batch_size must be >= 1"),
        ({"max_length": 0}, "reward.reward_model.max_length must be null or >= 1"),
        ({"enable": True}, "reward.reward_model.enable needs reward.reward_model.path"),
        ({"custom_cls": {"path": "x.py"}}, r"custom_cls\.path .* and .*custom_cls\.name .* come together"),
        ({"fsdp_config": {"offload": True}}, "fsdp_config has no key 'offload'"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardModel(**settings)
