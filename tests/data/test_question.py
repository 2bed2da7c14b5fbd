"""QuestionDataModule: a question of its own, or one row of many."""

from lit_rl.data.question import QuestionDataModule


def test_a_question_becomes_the_one_row() -> None:
    data = QuestionDataModule(
        question="57+68=?", ground_truth="125", source="lit_rl/arithmetic", val_files=None, train_batch_size=1
    )
    assert data.num_rows()["train"] == 1
    data.setup("fit")
    (batch,) = [batch for batch, _ in zip(data.only(0).train_dataloader(), range(1), strict=False)]
    assert batch.columns["prompt"] == [[{"role": "user", "content": "57+68=?"}]]
    assert batch.columns["reward_model"][0]["ground_truth"] == "125"
    assert batch.columns["data_source"] == ["lit_rl/arithmetic"]


def test_only_serves_its_row_in_every_step_with_the_same_tokenizer() -> None:
    data = QuestionDataModule(train_files="embedded/hard", val_files=None, train_batch_size=1)
    one = data.only(5)
    one.setup("fit")
    asked = [batch.columns["prompt"][0] for batch in one.train_dataloader()]
    every = data._opened("train")
    assert asked and all(prompt == every[5]["prompt"] for prompt in asked)
    assert one.chat is data.chat and data.num_rows()["train"] > 5
