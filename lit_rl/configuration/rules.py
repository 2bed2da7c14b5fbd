"""Rules between keys. Each takes the checked settings and returns a message that names every key, or None.

An option without effect in this combination is an error when it is set: when its value differs from the class
default and from the preset. What a settings block can know by itself it refuses by itself.
"""

from collections.abc import Callable

from lit_rl.configuration import algorithm_rules as algorithm
from lit_rl.configuration import batch_rules as batch
from lit_rl.configuration import critic_rules as critic
from lit_rl.configuration import input_rules as inputs
from lit_rl.configuration import objective_rules as objective
from lit_rl.configuration import rollout_rules as rollout
from lit_rl.configuration import run_rules as run
from lit_rl.configuration import sdpo_rules as sdpo
from lit_rl.configuration import search_rules as search
from lit_rl.configuration import sharding_rules as sharding
from lit_rl.configuration import trainer_rules as trainer
from lit_rl.configuration.settings import Settings

Rule = Callable[[Settings], str | None]

RULES: list[Rule] = [
    trainer.fixed_trainer_keys,
    trainer.known_strategy,
    trainer.several_devices,
    trainer.visible_accelerator,
    trainer.gradient_reduction,
    trainer.true_precision,
    trainer.flash_attention,
    trainer.cache_of_a_gpu,
    trainer.activation_offload,
    sharding.fsdp_config,
    sharding.parallel_sizes,
    sharding.sequence_parallel,
    sharding.without_fsdp,
    batch.whole_prompts_per_rank,
    batch.whole_optimizer_batches,
    batch.micro_batch_within_optimizer_batch,
    batch.micro_batch_holds_a_row,
    batch.token_budget_with_local_mean,
    algorithm.sampling_can_be_learned_from,
    algorithm.guided_decoding,
    rollout.engine_package,
    rollout.engine_log_probs,
    rollout.generation_kwargs,
    rollout.engine_kwargs,
    rollout.context_length,
    rollout.staleness,
    rollout.environment,
    rollout.adapters,
    rollout.tensor_parallel,
    rollout.group_port,
    algorithm.gathering,
    algorithm.every_row_truncated,
    algorithm.supervised_only,
    algorithm.model_switches,
    algorithm.repeated_keys,
    objective.groups_of_one,
    objective.discount,
    objective.scaling,
    objective.refills,
    objective.no_estimator,
    objective.one_kl,
    objective.kl_estimator,
    objective.kl_in_reward,
    objective.reference,
    objective.correction_off,
    objective.correction_on,
    critic.estimator_with_critic,
    critic.micro_batch_of_critic,
    critic.critic_like_policy,
    sdpo.policy_term_off,
    sdpo.distillation_off,
    sdpo.compared,
    sdpo.teacher_kind,
    sdpo.teacher_server,
    sdpo.demonstrations,
    sdpo.candidates,
    sdpo.feedback,
    sdpo.length_of_reprompt,
    sdpo.routing,
    sdpo.meter_has_validation_rows,
    sdpo.needs_sdpo,
    search.search_and_its_callback,
    search.search_needs,
    search.without_effect_in_search,
    search.pass_rate_of_best_of_k,
    search.dialogues,
    search.one_question,
    inputs.reward_functions,
    inputs.reward_model,
    inputs.unused_columns,
    inputs.data_switches,
    inputs.overlong_prompts,
    inputs.loader_workers,
    run.packages_of_loggers,
    run.resuming,
    run.nodes,
    run.monitoring,
    run.rolling_back,
    run.length_of_run,
    run.warm_up,
    run.shape_of_schedule,
    run.optimizer_and_schedule,
]
