"""Rules of the batch arithmetic: rows, optimizer batches, micro-batches and ranks."""

from lit_rl.configuration.settings import Settings


def ranks(settings: Settings) -> int:
    """W: data-parallel ranks, as far as they can be known before the trainer exists."""
    devices = settings["trainer.devices"]
    if isinstance(devices, list):
        count = len(devices)
    elif isinstance(devices, str) and not devices.lstrip("-").isdigit():
        count = _visible(settings)
    else:
        count = int(devices)
        count = _visible(settings) if count == -1 else count
    return max(count, 1) * settings["trainer.num_nodes"]


def _visible(settings: Settings) -> int:
    if settings["trainer.accelerator"] == "cpu":
        return 1
    import torch

    return torch.cuda.device_count() or 1


def rows_per_step(settings: Settings) -> int:
    """B = P * G, over all ranks; for sft a prompt is a row."""
    return settings["data.train_batch_size"] * settings.get("algo.num_generations", 1)


def rows_per_optimizer_step(settings: Settings) -> int:
    """M, over all ranks."""
    return settings["algo.batch.optimizer_batch_size"] or rows_per_step(settings)


def nearest(value: int, legal: list[int]) -> str:
    """The legal numbers next to a value, in words."""
    below = max((n for n in legal if n <= value), default=None)
    above = min((n for n in legal if n >= value), default=None)
    return " or ".join(str(n) for n in dict.fromkeys((below, above)) if n is not None)


def whole_prompts_per_rank(settings: Settings) -> str | None:
    """Rule 1: every rank serves the same number of whole prompts."""
    prompts, world = settings["data.train_batch_size"], ranks(settings)
    if prompts < 1 or prompts % world == 0:
        return None
    legal = [max(prompts // world, 1) * world, (prompts // world + 1) * world]
    return (
        f"data.train_batch_size (found {prompts}) must be a multiple of trainer.devices * trainer.num_nodes "
        f"(found {world}): a rank serves whole prompts. Nearest: {nearest(prompts, legal)}."
    )


def whole_optimizer_batches(settings: Settings) -> str | None:
    """Rule 2: optimizer batches cut a step evenly, and ranks cut an optimizer batch evenly."""
    rows, size, world = rows_per_step(settings), settings["algo.batch.optimizer_batch_size"], ranks(settings)
    if size is None or rows < 1 or (size > 0 and rows % size == 0 and size % world == 0):
        return None
    legal = [n for n in range(world, rows + 1, world) if rows % n == 0]
    return (
        f"algo.batch.optimizer_batch_size (found {size}) must divide the {rows} rows of a step "
        f"({_rows_in_words(settings)}) and be a multiple of the {world} rank(s). "
        f"Nearest: {nearest(size, legal)}."
    )


def micro_batch_within_optimizer_batch(settings: Settings) -> str | None:
    """Rule 2: a micro-batch is no larger than a rank's share of an optimizer batch."""
    key = "algo.batch.micro_batch_size"
    share = rows_per_optimizer_step(settings) // ranks(settings)
    if not settings.is_set(key) or settings[key] is None or settings[key] <= share:
        return None
    return (
        f"{key} (found {settings[key]}) must be at most {share}: an optimizer batch of "
        f"{rows_per_optimizer_step(settings)} rows over {ranks(settings)} rank(s) has no more rows on a rank."
    )


def micro_batch_holds_a_row(settings: Settings) -> str | None:
    """Rule 2: a budget in tokens holds the longest row."""
    prompt = settings.get("data.max_prompt_length")
    completion = settings.get("algo.sampling.max_completion_length")
    for name in ("micro_batch_tokens", "score_micro_batch_tokens"):
        tokens = settings.get(f"algo.batch.{name}")
        if (
            tokens is not None
            and prompt is not None
            and completion is not None
            and tokens < prompt + completion
        ):
            return (
                f"algo.batch.{name} (found {tokens}) must be at least {prompt + completion}: "
                f"data.max_prompt_length ({prompt}) + algo.sampling.max_completion_length ({completion}), "
                "so that every row fits."
            )
    return None


def token_budget_with_local_mean(settings: Settings) -> str | None:
    """Ruling 13: bnpo averages over the micro-batch, which a token budget cuts by length."""
    tokens = settings.get("algo.batch.micro_batch_tokens")
    if settings.get("algo.policy_loss.loss_type") != "bnpo" or tokens is None:
        return None
    return (
        f"algo.policy_loss.loss_type 'bnpo' averages over each micro-batch, so algo.batch.micro_batch_tokens "
        f"(found {tokens}) would weigh rows by their neighbours; set algo.batch.micro_batch_size, or take "
        f"'dapo'."
    )


def _rows_in_words(settings: Settings) -> str:
    prompts = settings["data.train_batch_size"]
    if "algo.num_generations" not in settings:
        return f"data.train_batch_size {prompts}"
    return f"data.train_batch_size {prompts} * algo.num_generations {settings['algo.num_generations']}"
