"""Breaches of the rules of SDPO and of search at test time, as in `rule_cases`."""

SEARCH_CASES = [
    ("task=search", ["task=search", "callbacks.test_time_search", "experiment=sdpo_test_time"]),
    ("experiment=sdpo_test_time task=fit", ["task=search", "callbacks.test_time_search"]),
    (
        "experiment=sdpo_test_time data.train_batch_size=2",
        ["callbacks.test_time_search", "data.train_batch_size=1"],
    ),
    (
        "experiment=sdpo_test_time callbacks.test_time_search.max_attempts=20",
        ["callbacks.test_time_search.max_attempts", "algo.num_generations"],
    ),
    (
        "experiment=sdpo_test_time algo.reprompt.include_environment_feedback=false",
        ["callbacks.test_time_search", "algo.reprompt.include_environment_feedback"],
    ),
    ("experiment=sdpo_test_time algo=grpo", ["algo.reprompt is not a key"]),
    ("experiment=sdpo_test_time checkpoint.save_freq=3", ["checkpoint.save_freq", "task=fit"]),
    ("experiment=sdpo_test_time trainer.max_steps=9", ["trainer.max_steps", "task=fit"]),
    ("experiment=sdpo_test_time logger=[csv]", ["logger", "logger=none"]),
    (
        "experiment=sdpo_test_time callbacks=[default,test_time_search]",
        ["callbacks.checkpoint", "callbacks.summary"],
    ),
    (
        "experiment=sdpo_test_time algo.distillation.prompt_weight=sqrt_pq",
        ["algo.distillation.prompt_weight"],
    ),
    ("experiment=sdpo_test_time data.question=why", ["data.question", "data.ground_truth"]),
    ("experiment=sdpo_test_time data.ground_truth=1", ["data.ground_truth", "data.question"]),
    (
        "experiment=sdpo_test_time data.question=why data.ground_truth=so data.train_files=rows.parquet",
        ["data.train_files", "data.question"],
    ),
    (
        "experiment=sdpo_test_time callbacks.test_time_search.baselines=[multi_turn] "
        "callbacks.test_time_search.pass_rate_samples=9",
        ["callbacks.test_time_search.pass_rate_samples", "best_of_k"],
    ),
    (
        "experiment=sdpo_test_time callbacks.test_time_search.baselines=[best_of_k] "
        "callbacks.test_time_search.max_dialogue_len=9",
        ["callbacks.test_time_search.max_dialogue_len", "multi_turn"],
    ),
]
SDPO_CASES = [
    ("algo.distillation.gate=run", ["algo.distillation.gate", "callbacks=[default,teacher_gap]"]),
    (
        "algo.num_generations=1 algo.distillation.prompt_weight=sqrt_pq "
        "algo.reprompt.include_environment_feedback=true",
        ["algo.distillation.prompt_weight", "algo.num_generations"],
    ),
    ("algo.distillation.rows=failed", ["algo.distillation.rows", "algo.distillation.distillation_weight"]),
    (
        "algo.distillation.distillation_weight=0 algo.distillation.prompt_weight=sqrt_pq",
        ["algo.distillation.prompt_weight", "algo.distillation.distillation_weight"],
    ),
    ("callbacks=[default,teacher_gap] data.val_files=null", ["callbacks.teacher_gap", "data.val_files"]),
    ("algo.kl.beta=0.1", ["algo.kl.beta", "algo.distillation.distillation_weight"]),
    ("algo.policy_loss.epsilon=0.1", ["algo.policy_loss.epsilon", "distillation_weight"]),
    ("algo.kl.use_kl_in_reward=true", ["algo.kl.use_kl_in_reward", "distillation_weight"]),
    ("policy_loss=gpg", ["policy_loss=gpg", "distillation_weight"]),
    (
        "algo.distillation.distillation_weight=0 algo.teacher.teacher_model_kind=live",
        ["algo.teacher.teacher_model_kind", "algo.distillation.distillation_weight"],
    ),
    (
        "algo.distillation.distillation_weight=0.5 algo.num_generations=1",
        ["algo.num_generations", "algo.advantage.adv_estimator"],
    ),
    (
        "algo.distillation.distillation_alpha=0.5",
        ["algo.distillation.distillation_alpha", "algo.distillation.distillation_mode"],
    ),
    (
        "algo.distillation.distillation_topk=5",
        ["algo.distillation.distillation_topk", "algo.distillation.distillation_mode"],
    ),
    (
        "algo.teacher.teacher_model_kind=base algo.teacher.teacher_update_rate=0.1",
        ["algo.teacher.teacher_update_rate", "algo.teacher.teacher_model_kind"],
    ),
    ("algo.teacher.teacher_update_rate=1.5", ["algo.teacher.teacher_update_rate", "1.5"]),
    (
        "algo.reprompt.use_successful_as_teacher=false",
        ["algo.reprompt.use_successful_as_teacher", "algo.reprompt.include_environment_feedback"],
    ),
    (
        "algo.reprompt.environment_feedback_only_without_solution=true",
        ["environment_feedback_only_without_solution", "algo.reprompt.include_environment_feedback"],
    ),
    (
        "algo.reprompt.use_successful_as_teacher=false algo.reprompt.include_environment_feedback=true "
        "algo.reprompt.demonstration=random",
        ["algo.reprompt.demonstration", "algo.reprompt.use_successful_as_teacher"],
    ),
    (
        "algo.reprompt.feedback_template='{feedback_raw}!'",
        ["algo.reprompt.feedback_template", "algo.reprompt.include_environment_feedback"],
    ),
    ("algo.reprompt.max_reprompt_len=32", ["algo.reprompt.max_reprompt_len", "data.max_prompt_length"]),
    ("algo.distillation.chunk_tokens=64", ["chunk_tokens", "algo.distillation.distillation_mode"]),
    (
        "algo.distillation.distillation_is_clip=3",
        ["distillation_is_clip", "algo.num_iterations", "algo.batch.optimizer_batch_size"],
    ),
    ("algo.distillation.distillation_is_clip=null", ["distillation_is_clip", "algo.num_iterations"]),
    (
        "algo.teacher.teacher_update_rate=0 algo.teacher.teacher_sync_steps=2",
        ["algo.teacher.teacher_sync_steps", "algo.teacher.teacher_update_rate"],
    ),
    (
        "algo.teacher.teacher_model_kind=trust_region algo.teacher.teacher_sync_steps=2",
        ["algo.teacher.teacher_sync_steps", "algo.teacher.teacher_model_kind"],
    ),
    ("algo.teacher.trust_region_mix=0.1", ["algo.teacher.trust_region_mix", "teacher_model_kind"]),
    ("algo.teacher.use_teacher_server=true", ["algo.teacher.use_teacher_server", "'live'"]),
    (
        "algo.teacher.use_teacher_server=true algo.teacher.teacher_model_kind=live",
        ["algo.teacher.use_teacher_server", "rollout=vllm_server"],
    ),
    (
        "algo.teacher.use_teacher_server=true algo.teacher.teacher_model_kind=live "
        "algo.distillation.distillation_weight=0.5",
        ["algo.teacher.use_teacher_server", "algo.distillation.distillation_weight"],
    ),
    (
        "algo.teacher.use_teacher_server=true algo.teacher.teacher_model_kind=live "
        "algo.distillation.distillation_mode=full_logits",
        ["algo.teacher.use_teacher_server", "algo.distillation.distillation_mode"],
    ),
    ("algo.num_generations=1", ["algo.num_generations", "algo.reprompt.use_successful_as_teacher"]),
    (
        "algo.num_generations=2 algo.reprompt.demonstration=shortest",
        ["algo.reprompt.demonstration", "algo.num_generations"],
    ),
    (
        "algo.reprompt.skip_successful_rows=true algo.reprompt.dont_reprompt_on_self_success=false",
        ["dont_reprompt_on_self_success", "algo.reprompt.skip_successful_rows"],
    ),
    (
        "algo.reprompt.feedback_source=column",
        ["algo.reprompt.feedback_source", "algo.reprompt.include_environment_feedback"],
    ),
    (
        "algo.reprompt.include_environment_feedback=true algo.reprompt.feedback_source=reward "
        "data.privileged_context_key=hint",
        ["data.privileged_context_key", "algo.reprompt.feedback_source"],
    ),
    (
        "data.remove_unused_columns=true algo.reprompt.include_environment_feedback=true",
        ["data.remove_unused_columns", "algo.reprompt.include_environment_feedback"],
    ),
]
