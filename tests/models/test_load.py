"""load_policy gives the model that the settings ask for, or one sentence that names the setting."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_rows, tiny_gpt2, tiny_llama, tiny_lora
from transformers import GenerationConfig

from lit_rl.errors import ConfigError
from lit_rl.models.load import LoRA, end_token_ids, load_policy
from lit_rl.models.parameters import decay_groups, trainable_parameters
from lit_rl.models.score import score
from lit_rl.models.weights import base_of


@pytest.fixture
def folder(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


@pytest.fixture
def adapter_folder(folder, tmp_path):
    policy = tiny_lora(load_policy(folder), b_std=0.1)
    policy.peft_config["default"].base_model_name_or_path = folder
    policy.save_pretrained(tmp_path / "adapter")
    return str(tmp_path / "adapter"), policy


def test_weights_arrive_in_the_asked_dtype_in_train_mode(folder):
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("auto", torch.float32)):
        policy = load_policy(folder, dtype=name)
        assert policy.dtype == dtype and policy.training
        torch.testing.assert_close(
            policy.lm_head.weight, tiny_llama().lm_head.weight.to(dtype), atol=0, rtol=0
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "fp8"}, r"model\.dtype must be 'auto' or one of float32, .* \(found 'fp8'\)"),
        ({"attn_implementation": "flash"}, r"model\.attn_implementation must be null or one of .*'flash'"),
        ({"model_init_kwargs": {"revison": "x"}}, r"model_init_kwargs\.revison .* did you mean 'revision'"),
        (
            {"model_init_kwargs": {"torch_dtype": "x"}},
            r"torch_dtype has a key of its own .* set model\.dtype",
        ),
        (
            {"gradient_checkpointing_kwargs": {"debug": True}},
            r"no effect with model\.gradient_checkpointing=false",
        ),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"reentrant": True}},
            r"gradient_checkpointing_kwargs\.reentrant .* did you mean 'use_reentrant'",
        ),
        (
            {"lora": LoRA(lora_rank=2, lora_dropout=0.1)},
            r"lora_dropout has no effect with model\.disable_dropout",
        ),
        ({"external_lib": ["json", "no_such_package"]}, r"model\.external_lib .*'no_such_package'"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_model_is_looked_for(settings, message):
    with pytest.raises(ConfigError, match=message):
        load_policy("/no/such/folder", **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is visible")
def test_flash_attention_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"flash_attention_2' needs a GPU"):
        load_policy(attn_implementation="flash_attention_2", dtype="bfloat16")


def test_flash_attention_needs_its_package_and_half_precision(monkeypatch):
    import importlib.util

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package flash-attn"):
        load_policy(attn_implementation="flash_attention_2", dtype="bfloat16")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    with pytest.raises(ConfigError, match=r"needs model\.dtype bfloat16 or float16 \(found 'float32'\)"):
        load_policy(attn_implementation="flash_attention_2")


def test_model_config_is_written_over_and_knows_its_names(folder):
    policy = load_policy(folder, model_config={"rms_norm_eps": 0.5}, attn_implementation="eager")
    assert policy.config.rms_norm_eps == 0.5 and policy.model.norm.variance_epsilon == 0.5
    assert policy.config._attn_implementation == "lit_rl_shared_eager"  # eager, and flat rows beside it
    with pytest.raises(ConfigError, match=r"model_config\.rms_norm_epsilon .* did you mean 'rms_norm_eps'"):
        load_policy(folder, model_config={"rms_norm_epsilon": 0.5})
    with pytest.raises(ConfigError, match=r"model_config\.dtype has a key of its own .* set model\.dtype"):
        load_policy(folder, model_config={"dtype": "float16"})


def test_a_folder_that_holds_no_model_is_an_error_with_its_key(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path .* cannot be loaded"):
        load_policy(str(tmp_path))


def test_a_hub_id_that_is_not_cached_and_cannot_be_fetched_is_an_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match=r"model\.path 'lit-rl/no-such-model' is neither .* cannot be fetched"
    ):
        load_policy("lit-rl/no-such-model")


def test_external_packages_are_imported_first(tmp_path, monkeypatch, folder):
    (tmp_path / "a_package_to_import_first.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    load_policy(folder, external_lib="a_package_to_import_first")
    assert "a_package_to_import_first" in sys.modules


@pytest.mark.field("sec/2")
def test_code_that_comes_with_a_model_runs_only_when_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    marker = tmp_path / "code_ran"
    model = tmp_path / "model"
    model.mkdir()
    auto_map = {"AutoConfig": "custom.CustomConfig", "AutoModelForCausalLM": "custom.CustomModel"}
    (model / "config.json").write_text(
        json.dumps({"model_type": "custom_of_this_test", "auto_map": auto_map})
    )
    (model / "custom.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class CustomConfig(LlamaConfig):\n    model_type = 'custom_of_this_test'\n"
        "class CustomModel(LlamaForCausalLM):\n    config_class = CustomConfig\n"
    )
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code must be true"):
        load_policy(str(model))
    assert not marker.exists()
    with pytest.raises(ConfigError, match=r"cannot be loaded"):  # the folder has no weights
        load_policy(str(model), trust_remote_code=True)
    assert marker.exists()


@pytest.mark.field("gen/2")
def test_sampling_settings_of_the_checkpoint_are_dropped_and_its_ids_kept(tmp_path):
    model = tiny_llama()
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.1,
        top_k=2,
        top_p=0.5,
        repetition_penalty=1.3,
        eos_token_id=[1, 7],
        pad_token_id=0,
    )
    model.save_pretrained(tmp_path)
    kept = load_policy(str(tmp_path)).generation_config
    assert kept.eos_token_id == [1, 7] and kept.pad_token_id == 0
    neutral = GenerationConfig()
    for name in ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty"):
        assert getattr(kept, name) == getattr(neutral, name)


@pytest.mark.field("gen/7")
def test_every_declared_end_id_counts_once(folder):
    policy = load_policy(folder)
    assert end_token_ids(policy, SimpleNamespace(eos_token_id=9)) == [1, 9]
    policy.generation_config.eos_token_id = [1, 4]
    assert end_token_ids(tiny_lora(policy), SimpleNamespace(eos_token_id=9)) == [1, 4, 9]
    assert end_token_ids(policy, SimpleNamespace(eos_token_id=None)) == [1, 4]


@pytest.mark.field("num/8")
def test_dropout_is_off_so_that_scoring_twice_gives_the_same(tmp_path):
    tiny_gpt2(attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1).save_pretrained(tmp_path)
    rows = make_rows((3, 5), (6, 4))
    policy = load_policy(str(tmp_path))
    assert policy.training and policy.config.attn_pdrop == policy.config.resid_pdrop == 0.0
    assert torch.equal(score(policy, rows).logps, score(policy, rows).logps)
    kept = load_policy(str(tmp_path), disable_dropout=False)
    assert not torch.equal(score(kept, rows).logps, score(kept, rows).logps)


@pytest.mark.parametrize("lora", [None, LoRA(lora_rank=2)])
def test_gradient_checkpointing_recomputes_and_changes_no_gradient(folder, lora):
    rows, gradients = make_rows((3, 5), (6, 4)), []
    for gradient_checkpointing in (False, True):
        torch.manual_seed(0)
        policy = load_policy(folder, gradient_checkpointing=gradient_checkpointing, lora=lora)
        calls = []
        layer = base_of(policy).model.layers[0]
        layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        score(policy, rows).logps.sum().backward()
        assert len(calls) == 1 + gradient_checkpointing
        gradients.append([p.grad for p in policy.parameters() if p.requires_grad])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, atol=1e-6, rtol=1e-6)


def test_fresh_adapters_change_nothing_and_are_all_that_trains(folder):
    policy = load_policy(folder, lora=LoRA(lora_rank=2, lora_alpha=4, target_modules="q_proj, v_proj"))
    names = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 2 * 2 and all("lora_" in name for name in names)
    rows = make_rows((3, 5), (6, 4))
    assert torch.equal(score(policy, rows).logps, score(load_policy(folder), rows).logps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": -1}, r"model\.lora\.lora_rank must be >= 0"),
        ({"lora_rank": 2, "lora_alpha": 0}, r"model\.lora\.lora_alpha must be > 0"),
        ({"lora_rank": 2, "lora_dropout": 1.0}, r"model\.lora\.lora_dropout must be in \[0, 1\)"),
        ({"lora_rank": 2, "target_modules": []}, r"model\.lora\.target_modules must be"),
        ({"lora_alpha": 32}, r"model\.lora\.lora_alpha has no effect with model\.lora\.lora_rank=0"),
        ({"peft_kwargs": {"use_rslora": True}}, r"model\.lora\.peft_kwargs has no effect"),
        ({"lora_rank": 2, "peft_kwargs": {"r": 3}}, r"peft_kwargs\.r has a key of its own"),
        ({"lora_rank": 2, "peft_kwargs": {"use_rs_lora": True}}, r"did you mean 'use_rslora'"),
        ({"lora_rank": 2, "peft_kwargs": {"use_dora": True}}, r"peft_kwargs\.use_dora must be False"),
        ({"lora_rank": 2, "peft_kwargs": {"init_lora_weights": "pissa"}}, r"must be True or 'gaussian'"),
    ],
)
def test_lora_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        LoRA(**settings)


def test_adapters_that_fit_no_layer_or_untie_embeddings_are_refused(folder):
    with pytest.raises(ConfigError, match=r"model\.lora cannot be put on this model"):
        load_policy(folder, lora=LoRA(lora_rank=2, target_modules=["no_such_layer"]))
    with pytest.raises(ConfigError, match=r"target_modules must leave out the embedding"):
        load_policy(folder, lora=LoRA(lora_rank=2, target_modules=["embed_tokens"]))


@pytest.mark.field("ckpt/10")
def test_a_trained_adapter_goes_on_training(adapter_folder):
    path, trained = adapter_folder
    policy = load_policy(path)
    assert len(trainable_parameters(policy)) == len(trainable_parameters(trained)) > 0
    rows = make_rows((3, 5), (6, 4))
    torch.testing.assert_close(score(policy, rows).logps, score(trained, rows).logps, atol=0, rtol=0)
    with pytest.raises(ConfigError, match=r"model\.lora\.lora_rank must be 0 when model\.path is an adapter"):
        load_policy(path, lora=LoRA(lora_rank=2))


@pytest.mark.field("ckpt/10")
def test_nothing_trainable_is_an_error():
    with pytest.raises(ConfigError, match="no trainable parameter"):
        trainable_parameters(tiny_llama().requires_grad_(False))


def test_norms_and_biases_do_not_decay():
    model = tiny_gpt2()
    decayed, plain = decay_groups(model)
    assert "weight_decay" not in decayed and plain["weight_decay"] == 0.0
    assert all(p.ndim == 2 for p in decayed["params"]) and all(p.ndim == 1 for p in plain["params"])
    assert {id(p) for g in (decayed, plain) for p in g["params"]} == {id(p) for p in model.parameters()}
    adapters = decay_groups(tiny_lora(tiny_llama()))
    assert len(adapters) == 1 and "weight_decay" not in adapters[0]


def test_routers_are_frozen_where_there_are_any(tmp_path, folder):
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    policy = load_policy(str(tmp_path / "moe"), freeze_moe_router=True)
    frozen = [name for name, p in policy.named_parameters() if not p.requires_grad]
    assert frozen == ["model.layers.0.mlp.gate.weight"]
    with pytest.raises(ConfigError, match=r"model\.freeze_moe_router needs a mixture of experts"):
        load_policy(folder, freeze_moe_router=True)


def test_gguf_without_its_package_is_an_error(tmp_path, monkeypatch):
    import importlib.util

    (tmp_path / "model.gguf").write_bytes(b"")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package gguf, .* lit-rl\[gguf\]"):
        load_policy(str(tmp_path / "model.gguf"))
