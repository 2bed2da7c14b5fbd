"""What writing completions takes in memory, found out on a model of the meta device."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_rl.memory import peak_of
from lit_rl.rollout.next_token import NextToken
from lit_rl.rollout.processors import draw_of
from lit_rl.rollout.sampling import Sampling


class DecodingMemory(NamedTuple):
    """Bytes beside the weights.

    Attributes:
        cache: keys and values of all rows when the last token is read.
        peak: everything alive at once, at most, the cache included.
    """

    cache: int
    peak: int


def decoding_memory(
    model: nn.Module,
    sampling: Sampling,
    *,
    prompts: int,
    rows: int,
    prompt_tokens: int,
    cache_implementation: str | None = None,
) -> DecodingMemory:
    """What `HFEngine` takes for rows that all go to their limit.

    Args:
        model: a `...ForCausalLM` on the meta device.
        sampling: how to draw.
        prompts: P, read at once.
        rows: completions written at once.
        prompt_tokens: S of the longest prompt.
        cache_implementation: as in `HFEngine`.
    """
    limit = sampling.max_completion_length
    next_token, device = NextToken(model, cache_implementation), torch.device("meta")
    draw = draw_of(sampling, prompt_width=prompt_tokens, end_ids=[], device=device)
    cache = 0

    def ids(count: int, width: int) -> Tensor:
        return torch.zeros(count, width, dtype=torch.long, device=device)

    def drawn(logits: Tensor) -> None:
        numbers = torch.zeros(rows, dtype=torch.float64, device=device) if sampling.temperature > 0 else None
        draw(logits, numbers, ids(rows, prompt_tokens + limit) if draw.needs_history else None)

    def work() -> None:
        nonlocal cache
        mask = torch.ones(prompts, prompt_tokens + limit, dtype=torch.bool, device=device)
        prompt_of = torch.arange(rows, device=device).remainder(prompts)
        with torch.no_grad(), next_token.reading(prompt_tokens + limit):
            read = ids(prompts, prompt_tokens)
            logits = next_token(read, read, mask[:, :prompt_tokens])
            next_token.keep(prompt_of)
            drawn(logits[prompt_of])
            if limit < 2:
                return
            cache = next_token.skip(limit - 2)
            drawn(next_token(ids(rows, 1), ids(rows, 1), mask[prompt_of][:, :-1]))

    model.eval()
    try:
        peak = peak_of(work)
    finally:
        model.train()
    return DecodingMemory(cache, peak)
