"""Progress: live in a terminal, lines elsewhere, silent when it is off; Lightning's own bar never shows."""

import io

import lightning as L
import pytest
from rich.console import Console

from lit_rl.callbacks.progress import Progress, line


@pytest.fixture
def terminal(monkeypatch) -> io.StringIO:
    """What a terminal of 100 columns is sent."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, height=30, force_jupyter=False)
    monkeypatch.setattr("lit_rl.callbacks.progress.get_console", lambda: console)
    return screen


def test_elsewhere_than_in_a_terminal_there_is_a_line_per_step(train, fake_module, capsys):
    train(fake_module(), [Progress()], steps=3, enable_progress_bar=True)
    out = capsys.readouterr().out
    lines = [text for text in out.splitlines() if text.startswith("step ")]
    assert [text.split("  ")[0] for text in lines] == ["step 1/3", "step 2/3", "step 3/3"]
    assert "reward 0.250" in lines[0] and "100 tokens/s" not in lines[0] and "tokens/s 100" in lines[0]
    assert "3 steps" in out and "reward, first and last step" in out


def test_a_long_run_has_about_fifty_lines(train, fake_module, capsys):
    callback = Progress()
    callback._total = 1000
    shown = [step for step in range(1, 1001) if callback._is_line_step(step)]
    assert len(shown) == 51 and shown[:2] == [1, 20] and shown[-1] == 1000


def test_nothing_is_shown_without_enable_progress_bar(train, fake_module, capsys):
    train(fake_module(), [Progress()], steps=3, enable_progress_bar=False)
    assert capsys.readouterr().out == ""


def test_lightnings_own_bar_stays_off(train, fake_module, capsys):
    trainer = train(fake_module(), [Progress()], steps=2, enable_progress_bar=True)
    assert trainer.progress_bar_callback.is_disabled
    assert "Epoch 0" not in capsys.readouterr().out


def test_in_a_terminal_the_bar_moves_and_ends_with_a_table(train, fake_module, terminal):
    class Generate(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            progress.generation_progress(3, 8)
            assert progress._live is not None
            progress._live.refresh()

    progress = Progress()
    train(fake_module(), [progress, Generate()], steps=2, enable_progress_bar=True)
    shown = terminal.getvalue()
    assert "generating" in shown and "3/8" in shown and "2/2" in shown and "2 steps" in shown
    assert progress._live is None


def test_an_error_in_training_gives_the_terminal_back(train, fake_module, terminal):
    def fail(step: int) -> dict[str, float]:
        raise RuntimeError("broken step")

    progress = Progress()
    with pytest.raises(RuntimeError, match="broken step"):
        train(fake_module(fail), [progress], enable_progress_bar=True)
    assert progress._live is None
    assert terminal.getvalue().endswith("\x1b[?25h")  # the cursor is visible again


def test_progress_of_a_generation_outside_training_is_harmless():
    Progress().generation_progress(1, 2)


def test_the_shares_of_the_time_add_up_and_absent_metrics_are_left_out():
    text = line({"train/loss": 0.5, "time/generate": 3.0, "time/update": 1.0})
    assert text == "loss 0.5  generate 75% update 25%"
