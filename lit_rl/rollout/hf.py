"""HFEngine: completions written by the training model itself, or by a copy of it in another dtype."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lit_rl.batch import RolloutBatch, length_mask
from lit_rl.errors import ConfigError, DataError
from lit_rl.rollout.cache import check_cache_implementation
from lit_rl.rollout.decode import Writer, Written
from lit_rl.rollout.ends import StopStrings
from lit_rl.rollout.engine import RolloutEngine
from lit_rl.rollout.next_token import NextToken, decoding
from lit_rl.rollout.noise import uniforms
from lit_rl.rollout.prepacked import prepacked
from lit_rl.rollout.processors import draw_of
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.scoring import Scores, model_scores
from lit_rl.rollout.weights import base_of, merged_copy, refresh_

_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


class HFEngine(RolloutEngine):
    """Writes with a transformers model, of text or of images and text, on any device, without a server.

    The model's own generation defaults are never read. A completion depends on the weights, its prompt, the
    sampling settings and (seed, step, prompt row, generation index), and on nothing else: rows beside it in
    the batch change its logits by rounding only.

    Args:
        dtype: "auto" writes with the training model itself; another dtype than the model's keeps a copy,
            which `sync_weights` refreshes.
        max_num_seqs: rows written at once; bounds the memory of cache and logits. Where rows end, waiting
            ones begin in their place; a prompt whose group is split so is read once per part.
        cache_implementation: null or "dynamic" grows with the completions, "static" takes the full length at
            once.
        ds3_gather_for_generation: bring weights that are cut over processes together to write, once per
            generation; false is not built.

    Raises:
        ConfigError: a value is none of these.
    """

    reads_images = True

    def __init__(
        self,
        dtype: str = "auto",
        max_num_seqs: int = 1024,
        cache_implementation: str | None = None,
        ds3_gather_for_generation: bool = True,
    ) -> None:
        if not ds3_gather_for_generation:
            raise ConfigError(
                "rollout.engine.ds3_gather_for_generation must be true (found False): writing with weights "
                "that stay cut over processes is not built."
            )
        if dtype not in _DTYPES:
            raise ConfigError(f"rollout.engine.dtype must be one of {', '.join(_DTYPES)} (found {dtype!r}).")
        if max_num_seqs < 1:
            raise ConfigError(f"rollout.engine.max_num_seqs must be >= 1 (found {max_num_seqs!r}).")
        check_cache_implementation(cache_implementation)
        self.dtype = dtype
        self.max_num_seqs = max_num_seqs
        self.cache_implementation = cache_implementation
        self._announced: set[str] = set()

    def bind(
        self,
        policy: nn.Module,
        *,
        end_token_ids: list[int],
        pad_token_id: int,
        decode: Callable[[list[int]], str],
        tokenizer: Any = None,
        max_tokens: int | None = None,
    ) -> None:
        """See `RolloutEngine.bind`. A shared policy with LoRA writes with its active adapters."""
        own = next(p.dtype for p in policy.parameters() if p.is_floating_point())
        wanted = own if self.dtype == "auto" else getattr(torch, self.dtype)
        self._is_copy = wanted != own
        self.writes_with_policy = not self._is_copy
        if self._is_copy:
            self._model = merged_copy(policy, wanted)
        else:
            self._model = base_of(policy)
        self._next_token = NextToken(self._model, self.cache_implementation)
        self._end_token_ids = list(end_token_ids)
        self._pad_token_id = pad_token_id
        self._decode = decode

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine.sync_weights`. A shared model has the weights; the tensors are not read."""
        if self._is_copy:
            refresh_(self._model, named_tensors)
        self.policy_version = version

    def generate(
        self,
        prompts: RolloutBatch,
        *,
        num_generations: int,
        sampling: Sampling,
        seed: int,
        step: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> RolloutBatch:
        """See `RolloutEngine.generate`.

        Raises:
            ConfigError: a setting that this engine cannot follow, or a prompt leaves too few positions.
            DataError: a prompt without tokens.
            RuntimeError: the model's logits are not finite.
        """
        sampling = sampling.effective()
        self._check(sampling, prompts)
        rows = prompts.repeat(num_generations)
        noise = None
        if sampling.temperature > 0:
            generations = list(range(num_generations)) * len(prompts)
            noise = uniforms(
                seed, step, rows.prompt_row.tolist(), generations, sampling.max_completion_length
            )
        with decoding(self._model), prepacked(self._model):
            written = self._written(prompts, num_generations, sampling, noise, on_progress)
        return self._filled(rows, written)

    def score(self, rows: RolloutBatch, *, topk: int = 0) -> Scores:
        """See `RolloutEngine.score`."""
        parts = []
        with decoding(self._model):
            for start in range(0, len(rows), self.max_num_seqs):
                parts.append(
                    model_scores(self._model, rows.select(slice(start, start + self.max_num_seqs)), topk)
                )
        return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _check(self, sampling: Sampling, prompts: RolloutBatch) -> None:
        if sampling.guided_decoding_regex is not None:
            raise ConfigError(
                f"{sampling.key}.guided_decoding_regex must be null with rollout=hf "
                f"(found {sampling.guided_decoding_regex!r}); use rollout=vllm, vllm_server or sglang."
            )
        empty = (prompts.prompt_len < 1).nonzero()
        if len(empty):
            raise DataError(
                f"data row {int(prompts.prompt_row[empty[0, 0]])} has a prompt without tokens; give it text."
            )
        config = self._model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
        room = getattr(config, "max_position_embeddings", None)
        longest = int(prompts.prompt_len.max())
        if room is not None and longest + sampling.max_completion_length > room:
            raise ConfigError(
                f"{sampling.key}.max_completion_length must be <= {room - longest} for a prompt of {longest} "
                f"tokens (found {sampling.max_completion_length}): the model has {room} positions."
            )
        self._announce(sampling)

    def _announce(self, sampling: Sampling) -> None:
        """Say once what rollouts are drawn with, whatever the model's own defaults are."""
        text = (
            f"rollout=hf, {'a copy in ' if self._is_copy else 'the training model, '}"
            f"{next(self._model.parameters()).dtype}; {sampling}; end ids {self._ends(sampling)}"
        )
        if sampling.is_new_to(self._announced):
            rank_zero_info(text)

    def _ends(self, sampling: Sampling) -> list[int]:
        declared = [] if sampling.ignore_eos else self._end_token_ids
        return sorted({*declared, *sampling.stop_token_ids})

    def _written(
        self,
        prompts: RolloutBatch,
        num_generations: int,
        sampling: Sampling,
        noise: Tensor | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> Written:
        device = next(self._model.parameters()).device
        rows = len(prompts) * num_generations
        prompt_ids = prompts.prompt_ids[:, prompts.prompt_ids.shape[1] - int(prompts.prompt_len.max()) :]
        ends = self._ends(sampling)
        writer = Writer(
            draw_of(sampling, prompt_width=prompt_ids.shape[1], end_ids=ends, device=device),
            end_ids=ends,
            stop=StopStrings(sampling.stop, self._decode),
            max_tokens=sampling.max_completion_length,
            max_rows=self.max_num_seqs,
            on_finished=lambda finished: on_progress(finished, rows) if on_progress else None,
        )
        return writer(
            self._next_token,
            prompt_ids.to(device),
            prompts.prompt_len.to(device),
            torch.arange(len(prompts), device=device).repeat_interleave(num_generations),
            None if noise is None else noise.to(device),
            prompts.images,
        )

    def _filled(self, rows: RolloutBatch, written: Written) -> RolloutBatch:
        """The rows with what was written, padded to the longest completion."""
        device = rows.prompt_ids.device
        lengths = written.lengths
        width = int(lengths.max())
        exists = length_mask(lengths, width)
        ids = written.ids[:, :width].masked_fill(~exists, self._pad_token_id)
        logps = written.logps[:, :width].masked_fill(~exists, 0.0)
        broken = (~logps.isfinite()).nonzero()
        if len(broken):
            row, token = broken[0].tolist()
            raise RuntimeError(
                f"the logits of data row {int(rows.prompt_row[row])} are not finite at token {token}; "
                f"policy version {self.policy_version} holds NaN or inf, or overflows in {self.dtype}."
            )
        return replace(
            rows,
            completion_ids=ids.to(device),
            completion_len=lengths.to(device),
            completion_mask=exists.to(device),
            finish_reason=["stop" if is_stopped else "length" for is_stopped in written.stopped.tolist()],
            policy_version=torch.full((len(rows),), self.policy_version, device=device),
            rollout_logps=logps.to(device),
        )
