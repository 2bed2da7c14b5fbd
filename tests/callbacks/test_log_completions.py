"""LogCompletions: what a line holds, which rows, awkward text, resume, failures."""

import json
import os
import socket
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.multiprocessing as mp
from rich.console import Console

from lit_rl.batch import RolloutBatch, padded
from lit_rl.callbacks.log_completions import LogCompletions, completion_rows, gathered_rows, table
from lit_rl.callbacks.trackers import markdown
from lit_rl.errors import ConfigError

AWKWARD = 'a\nb "quoted" \\ | é \ud83d end'


class FakeChat:
    """Ids are letters; id 99 is text that is hard to write."""

    def decode(self, ids: list[int]) -> str:
        return "".join(AWKWARD if i == 99 else chr(96 + i) for i in ids)


def rollout(P: int = 2, G: int = 4, rank: int = 0, world: int = 1) -> RolloutBatch:
    """Prompt p of rank r is data row p * world + r; completion g of it has g + 1 tokens."""
    prompts = [[p + 1] * (p + 1) for p in range(P)]
    prompt_ids, prompt_len = padded(prompts, "left")
    rows = torch.arange(P) * world + rank
    batch = RolloutBatch(prompt_ids, prompt_len, rows).repeat(G)
    completions = [[g + 1] * (g + 1) for _ in range(P) for g in range(G)]
    batch.completion_ids, batch.completion_len = padded(completions, "right")
    batch.completion_mask = batch.token_mask
    batch.finish_reason = (["stop", "length"] * P * G)[: P * G]
    batch.feedback = ([None, "wrong"] * P * G)[: P * G]
    batch.rewards = torch.arange(P * G).float()
    batch.rewards_per_func = torch.stack([batch.rewards, torch.full((P * G,), float("nan"))], 1)
    batch.advantages = batch.rewards - 1
    return batch


def lines(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text("ascii").splitlines()]


@pytest.fixture
def module(fake_module):
    made = fake_module()
    made.chat = FakeChat()
    made.reward_names = ["right", "short"]
    made.make_rollout = lambda step: rollout()
    made.validation = SimpleNamespace(rollouts=[rollout(P=3, G=1), rollout(P=2, G=1)])
    return made


@pytest.mark.field("log/2")
def test_a_line_holds_everything_about_its_row(train, module, tmp_path):
    train(module, [LogCompletions(str(tmp_path / "r"))], steps=2)
    rows = lines(tmp_path / "r" / "completions.jsonl")
    assert len(rows) == 16
    assert len({(row["step"], row["prompt_row"], row["generation"]) for row in rows}) == 16
    assert rows[13] == {
        "step": 2,
        "prompt_row": 1,
        "generation": 1,
        "prompt": "bb",
        "completion": "bb",
        "rewards": {"right": 5.0, "short": None},
        "reward": 5.0,
        "advantage": 4.0,
        "length": 2,
        "finish_reason": "length",
        "feedback": "wrong",
    }


@pytest.mark.field("log/2")
def test_newlines_quotes_and_lone_surrogates_survive(train, module, tmp_path):
    def awkward(step: int) -> RolloutBatch:
        batch = rollout()
        batch.completion_ids[0, 0] = 99
        return batch

    module.make_rollout = awkward
    train(module, [LogCompletions(str(tmp_path / "r"))], steps=1)
    assert lines(tmp_path / "r" / "completions.jsonl")[0]["completion"] == AWKWARD


@pytest.mark.field("log/2")
def test_the_number_of_rows_and_the_period_are_bounds(train, module, tmp_path):
    train(module, [LogCompletions(str(tmp_path / "r"), num_rows=3, every_n_steps=2)], steps=5)
    rows = lines(tmp_path / "r" / "completions.jsonl")
    assert [row["step"] for row in rows] == [2, 2, 2, 4, 4, 4]
    assert [row["generation"] for row in rows[:3]] == [0, 1, 2]


@pytest.mark.field("log/2")
def test_a_full_disk_warns_and_training_goes_on(train, module, tmp_path):
    (tmp_path / "r").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="Completions were not written"):
        trainer = train(module, [LogCompletions(str(tmp_path / "r"))], steps=2)
    assert trainer.global_step == 2


@pytest.mark.field("log/2")
def test_validation_has_its_own_file(train, module, tmp_path):
    callback = LogCompletions(str(tmp_path / "r"), log_val_generations=4)
    train(module, [callback], steps=2, val_check_interval=2)
    rows = lines(tmp_path / "r" / "completions_val.jsonl")
    assert [(row["step"], row["prompt"]) for row in rows] == [(2, "a"), (2, "bb"), (2, "ccc"), (2, "a")]


def test_no_validation_rows_by_default(train, module, tmp_path):
    train(module, [LogCompletions(str(tmp_path / "r"))], steps=2, val_check_interval=2)
    assert not (tmp_path / "r" / "completions_val.jsonl").exists()


def gather_on(rank: int, port: int, folder) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    fake = SimpleNamespace(chat=FakeChat(), reward_names=["right", "short"])
    rows = gathered_rows(fake, [rollout(P=1 if rank else 2, G=2, rank=rank, world=2)], step=1, limit=5)
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.field("log/2")
def test_rows_of_two_ranks_come_once_each_in_the_order_of_prompts(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(gather_on, (port, tmp_path), nprocs=2)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(r["prompt_row"], r["generation"]) for r in rows] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_a_resumed_run_takes_out_the_lines_it_makes_again(train, module, tmp_path):
    folder = tmp_path / "r"
    train(module, [LogCompletions(str(folder), num_rows=1)], steps=5)
    callback = LogCompletions(str(folder), num_rows=1)
    callback.on_train_start(SimpleNamespace(global_step=3), module)  # type: ignore[arg-type]
    with (folder / "completions.jsonl").open("a") as file:
        file.write('{"step": 6, "cut by a kill')
    callback._write(callback.file, [{"step": 4}])
    assert [row["step"] for row in lines(folder / "completions.jsonl")] == [1, 2, 3, 4]


@pytest.mark.field("log/3")
def test_a_fresh_run_in_a_used_folder_keeps_the_old_file(train, module, tmp_path):
    for _ in range(3):
        train(module, [LogCompletions(str(tmp_path / "r"), num_rows=1)], steps=2)
    files = sorted(path.name for path in (tmp_path / "r").iterdir())
    assert files == ["completions.1.jsonl", "completions.2.jsonl", "completions.jsonl"]
    assert all(len(lines(tmp_path / "r" / name)) == 2 for name in files)


def test_rows_without_rewards_and_with_token_advantages_are_fine():
    batch = rollout()
    batch.rewards = batch.rewards_per_func = batch.feedback = batch.finish_reason = None
    batch.advantages = torch.ones(8, 4).cumsum(1)
    rows = completion_rows(batch, FakeChat(), [], step=1)
    assert rows[1]["rewards"] == {} and rows[1]["reward"] is None
    assert rows[1]["advantage"] == 1.5  # tokens 1 and 2


def test_text_goes_to_tensorboard_whatever_is_in_it(train, module, tmp_path):
    def awkward(step: int) -> RolloutBatch:
        batch = rollout()
        batch.completion_ids[0, 0] = 99
        return batch

    module.make_rollout = awkward
    logger = L.pytorch.loggers.TensorBoardLogger(tmp_path / "r", name="tensorboard", version="")
    train(module, [LogCompletions(str(tmp_path / "r"), num_rows=2)], steps=1, logger=logger)
    [events] = (tmp_path / "r" / "tensorboard").glob("events*")
    assert b"a<br>b" in events.read_bytes()


def test_a_markdown_cell_is_one_line():
    rows = completion_rows(rollout(), FakeChat(), ["right", "short"], step=1)
    rows[0]["completion"] = AWKWARD
    assert len(markdown(rows).splitlines()) == 2 + len(rows)


def test_the_console_table_keeps_each_row_on_one_line():
    rows = completion_rows(rollout(), FakeChat(), ["right", "short"], step=1)
    rows[0]["completion"] = "[bold]no markup[/bold] " + AWKWARD * 20
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table(rows, "Step 1"))
    text = console.export_text()
    assert "[bold]no" in text and "right" in text
    assert len(text.splitlines()) == 5 + len(rows)


@pytest.mark.parametrize(
    "settings", [{"num_rows": 0}, {"every_n_steps": 0}, {"log_val_generations": -1}], ids=str
)
def test_values_out_of_range_are_refused_by_name(settings):
    with pytest.raises(ConfigError, match=rf"callbacks\.log_completions\.{next(iter(settings))}"):
        LogCompletions("run", **settings)
