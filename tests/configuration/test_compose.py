"""From a command line to plain trees: links, what follows another key, and what counts as set."""

import pytest

from lit_rl.configuration.compose import Source, compose, sweep_jobs
from lit_rl.configuration.job import checked, quoted
from lit_rl.configuration.plan import differences
from lit_rl.configuration.tree import expanded, leaves


def test_the_tree_is_plain_and_whole_nodes_stay_links(source: Source) -> None:
    tree = compose(source, ["algo=grpo"]).tree
    assert tree["algo"]["policy"] == "${model}"
    assert tree["data"]["tokenizer"] == tree["model"]["path"] == "embedded"
    assert type(tree["optim"]["betas"]) is list
    whole = expanded(tree)
    assert whole["algo"]["policy"] == tree["model"]
    assert not any(isinstance(value, str) and value.startswith("${") for _, value in leaves(whole))


def test_a_key_that_follows_another_one_is_not_set(source: Source) -> None:
    settings = checked(source, ["algo=grpo", "seed=7"]).settings
    assert settings["data.seed"] == 7
    assert settings.is_set("seed")
    assert not settings.is_set("data.seed")
    assert not any(line.startswith("data.seed") for line in differences(settings))


def test_the_preset_of_the_embedded_run_drops_out_with_another_model(source: Source) -> None:
    embedded = compose(source, ["algo=grpo"]).tree
    other = compose(source, ["algo=grpo", "model=hf", "model.path=somewhere"]).tree
    assert embedded["data"]["max_prompt_length"] == 64
    assert other["data"]["max_prompt_length"] == 512
    assert other["algo"]["sampling"]["max_completion_length"] == 256


def test_the_command_line_wins_over_debug_and_debug_over_presets(source: Source) -> None:
    tree = compose(source, ["algo=grpo", "debug=fast", "trainer.max_steps=9"]).tree
    assert tree["trainer"]["max_steps"] == 9
    assert tree["trainer"]["val_check_interval"] == 1


def test_the_baseline_makes_the_same_choices_and_sets_nothing(source: Source) -> None:
    composition = compose(
        source,
        ["experiment=sdpo_rich_feedback", "optim=sgd", "callbacks=[default]", "algo.num_generations=4"],
    )
    baseline = composition.baseline
    assert baseline["algo"]["_target_"] == composition.tree["algo"]["_target_"]
    assert baseline["optim"]["_target_"] == "torch.optim.SGD"
    assert baseline["algo"]["num_generations"] == 8
    assert baseline["algo"]["reprompt"]["include_environment_feedback"] is True, "an experiment is a choice"


def test_a_sweep_is_every_combination(source: Source) -> None:
    jobs = sweep_jobs(source, ["algo=grpo", "seed=1,2", "optim.lr=1e-5,1e-6"])
    assert len(jobs) == 4
    assert jobs[1] == ["algo=grpo", "seed=1", "optim.lr=1e-06"]


@pytest.mark.parametrize("folder", ["a b", "it's", "x=1,2", "back\\slash", "${no}"])
def test_any_folder_name_goes_through_the_command_line(source: Source, folder: str) -> None:
    if folder == "${no}":
        folder = "dollar$"
    tree = compose(source, ["algo=grpo", f"run_dir={quoted(f'outputs/{folder}')}"]).tree
    assert tree["run_dir"] == f"outputs/{folder}"
