"""Estimates against real tensors: those that exist after a step, and those that a forward pass keeps."""

import gc
import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.optim import SGD, AdamW
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    Qwen3MoeConfig,
)
from transformers.optimization import Adafactor

from strop.cli.estimate import main
from strop.rollout.generator import InProcessGenerator
from strop.rollout.types import Sampling
from strop.runs.estimate import (
    RolloutSizes,
    activation_bytes,
    blockwise,
    estimate,
    estimate_rollouts,
    kept_by_layer,
    kv_bytes,
    logit_bytes,
    optimizer_states,
    readable,
    shapes_of,
)
from strop.trainer.grpo import GRPOConfig, GRPOTrainer

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA = LlamaConfig(**TINY, **HEADS, pad_token_id=0)
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])


def real_bytes(model, optimizer):
    """Bytes of the tensors that exist after one step."""
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    states = [s for state in optimizer.state.values() for s in state.values() if torch.is_tensor(s) and s.dim()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [sum(t.numel() * t.element_size() for t in group) for group in (model.parameters(), gradients, states)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("optim", "cls", "options"),
    [
        ("adamw_torch", AdamW, {}),
        ("sgd", SGD, {"lr": 0.1}),
        ("adafactor", Adafactor, {}),
    ],
)
@pytest.mark.parametrize("peft_config", [None, LORA])
def test_weights_gradients_and_states_are_those_of_a_real_step(dtype, optim, cls, options, peft_config):
    model = LlamaForCausalLM(LLAMA).to(dtype)
    model = get_peft_model(model, peft_config) if peft_config else model
    real = real_bytes(model, cls([p for p in model.parameters() if p.requires_grad], **options))
    found = estimate(LLAMA, batch_size=2, length=6, dtype=dtype, optim=optim, peft_config=peft_config)
    assert [found.weights, found.gradients, found.optimizer] == real


def test_the_anchors():
    n = sum(p.numel() for p in LlamaForCausalLM(LLAMA).parameters())
    adamw = estimate(LLAMA, batch_size=1, length=8)
    assert adamw.weights + adamw.gradients + adamw.optimizer == 16 * n
    lora = estimate(LLAMA, batch_size=1, length=8, peft_config=LORA)
    trained = 2 * (4 * (32 + 32) + 4 * (64 + 32))  # two layers: rank times in + out of q_proj and down_proj
    assert lora.weights + lora.gradients + lora.optimizer == 4 * n + 16 * trained
    with_reference = estimate(LLAMA, batch_size=1, length=8, reference=LLAMA)
    assert with_reference.total - adamw.total == 4 * n


def test_a_quantised_base_keeps_half_a_byte_a_weight_and_scales():
    #  linear weights of a layer: q and o 32 x 32, k and v 32 x 16, three of the MLP 32 x 64
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    plain, four, eight = (
        estimate(LLAMA, batch_size=1, length=8, peft_config=LORA, weight_bits=bits).weights for bits in (None, 4, 8)
    )
    assert plain - four == 4 * linear - (linear // 2 + 4 * linear // 64)
    rows = 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32)
    assert plain - eight == 4 * linear - (linear + 4 * rows)


def kept_by_a_real_forward(model, batch_size, length):
    seen, total = {p.untyped_storage().data_ptr() for p in model.parameters()}, 0
    alive = []

    def keep(tensor):
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            alive.append(tensor)
            total += storage.nbytes()
        return tensor

    embedded = model.get_input_embeddings()(torch.zeros(batch_size, length, dtype=torch.int64)).detach()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(inputs_embeds=embedded.requires_grad_(), use_cache=False)
    return total, output


@pytest.mark.parametrize("peft_config", [None, LORA])
def test_activations_are_what_a_real_forward_pass_keeps(peft_config):
    model = LlamaForCausalLM(LLAMA)
    model.set_attn_implementation("sdpa")
    wrapped = get_peft_model(model, peft_config) if peft_config else model
    real, _ = kept_by_a_real_forward(wrapped.get_base_model() if peft_config else model, 3, 64)
    found = activation_bytes(shapes_of(LLAMA, torch.float32, peft_config), 3, 64, checkpointing=False)
    assert found == pytest.approx(real, rel=0.01)


def test_checkpointing_keeps_one_layer_and_the_inputs_of_all():
    kept = kept_by_layer(shapes_of(LLAMA, torch.float32, None), 3, 64)
    assert kept[0] == pytest.approx(kept[1], rel=0.1)
    inputs = 2 * (3 * 64 * 32 * 4)  # two layers, rows, tokens, hidden size, bytes
    expected = inputs + max(kept[0], kept[1]) + kept[None]
    assert activation_bytes(shapes_of(LLAMA, torch.float32, None), 3, 64, checkpointing=True) == expected


@pytest.mark.parametrize(
    "config",
    [
        Gemma3TextConfig(**TINY, **HEADS, head_dim=8),
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, bos_token_id=0, eos_token_id=0),
        GPTNeoXConfig(**TINY, num_attention_heads=4),
        Qwen3MoeConfig(**TINY, **HEADS, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
        MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2),
    ],
    ids=lambda config: config.model_type,
)
def test_activations_of_other_families_grow_with_rows(config):
    model = {size: estimate(config, batch_size=size, length=32, checkpointing=False) for size in (1, 2, 3)}
    assert model[1].weights == model[3].weights
    once, twice = (model[b].activations - model[a].activations for a, b in ((1, 2), (2, 3)))
    assert once == pytest.approx(twice, rel=0.02)  # single rows spare some layers a copy
    assert twice > 32 * 32 * 4  # more than one hidden state a token


def test_logits_are_tiled():
    # 512 tokens a tile and 1 GiB for all: 5461 tokens of 49152 float32 logits fit, that is 10 tiles
    config = LlamaConfig(vocab_size=49152)
    assert logit_bytes(config, 100, torch.float32, "cpu") == 100 * 49152 * 4
    assert logit_bytes(config, 10**6, torch.float32, "cpu") == 10 * 512 * 49152 * 4


def test_a_cached_token_is_a_key_and_a_value_of_each_layer_and_head():
    assert kv_bytes(LLAMA, torch.bfloat16) == 2 * 2 * 2 * 8 * 2  # key and value, layers, heads, head size, bytes
    assert estimate(LLAMA, batch_size=1, length=8, cached_tokens=10).kv_cache == 10 * 2 * 2 * 2 * 8 * 4


MINI = LlamaConfig(
    vocab_size=4096, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=6,
    num_key_value_heads=2, head_dim=16, pad_token_id=0, tie_word_embeddings=True,
)  # fmt: skip


def peak_of(work):
    """Bytes allocated at most beyond those at the start."""
    gc.collect()  # what other tests leave must not be freed meanwhile
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    live = most = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        live += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, live)
    return most


@pytest.mark.parametrize("sizes", [RolloutSizes(16, 4, 4, 48, 24), RolloutSizes(12, 4, 2, 200, 12)], ids=str)
def test_what_generation_takes_is_at_most_what_was_estimated_and_two_fifths_at_least(sizes):
    generator = InProcessGenerator(LlamaForCausalLM(MINI))
    generator._checked = True  # which is done once, before there are states of an optimizer
    prompts = [[7 + i // sizes.group] * sizes.prompt for i in range(sizes.rows)]
    real = peak_of(lambda: generator.generate(prompts, Sampling(max_tokens=sizes.completion)))
    found = estimate_rollouts(MINI, sizes).generation
    assert real <= found.activations + found.logits + found.kv_cache <= 2.5 * real


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_whole_step_of_grpo_takes_what_was_estimated(beta, bpe_tokenizer, tmp_path):
    sizes = RolloutSizes(16, 8, 4, 8, 16)
    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, save_strategy="no", max_steps=2, beta=beta,
        per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=4, max_completion_length=16,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "What is hot?"}] * 8)
    model = LlamaForCausalLM(MINI)
    rewards = [lambda completions, **_: list(range(len(completions)))]
    trainer = GRPOTrainer(model, rewards, args, rows, processing_class=bpe_tokenizer)
    found = estimate_rollouts(MINI, sizes, reference=MINI if beta else None)
    models = found.training.weights + found.training.reference
    assert models + peak_of(trainer.train) == pytest.approx(found.total, rel=0.2)


def test_8_bit_states_have_scales_and_leave_small_parameters_alone():
    assert blockwise(2)(torch.empty(64, 64)) == 2 * (4096 + 4 * 16)
    assert blockwise(2)(torch.empty(4095)) == 2 * 4 * 4095


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"optim='adamw_torhc' are not known.*adamw_torch"):
        optimizer_states("adamw_torhc")


def test_sizes_are_readable():
    assert [readable(size) for size in (12, 1536, 3 * 2**30)] == ["12 B", "1.5 KiB", "3 GiB"]


def test_the_command_reads_the_options_of_a_run(tiny_folder, tiny_llama, capsys):
    for weights in tiny_folder.glob("*.safetensors"):
        weights.unlink()
    assert main(["--model", str(tiny_folder), "--max_length", "64", "--use_cpu", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)
    n = sum(p.numel() for p in tiny_llama.parameters())
    assert (parts["weights"], parts["optimizer"]) == (4 * n, 8 * n)
    main(["--model", str(tiny_folder), "--use_peft", "--use_cpu"])
    assert "training a LoRA adapter on" in capsys.readouterr().out
    with pytest.raises(ValueError, match="max_length is None"):
        main(["--model", str(tiny_folder), "--max_length", "none", "--use_cpu"])


def test_a_pair_is_two_rows_beside_a_reference_unless_the_adapter_can_be_switched_off(tiny_folder, tiny_llama, capsys):
    run = ["--model", str(tiny_folder), "--max_length", "64", "--per_device_train_batch_size", "4", "--use_cpu"]

    def parts(method, *words):
        assert main([method, *run, *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    pairs, eight = parts("dpo"), parts("sft", "--per_device_train_batch_size", "8")
    assert pairs["activations"] == eight["activations"] > parts("sft")["activations"]
    assert (pairs["reference"], eight["reference"]) == (pairs["weights"], 0)
    assert parts("dpo", "--use_peft")["reference"] == 0
    named = parts("dpo", "--use_peft", "--ref_model_name_or_path", str(tiny_folder))
    assert named["reference"] == pairs["weights"]


@pytest.mark.parametrize("method", ["reward", "prm"])
def test_an_adapter_of_a_classifier_trains_its_head(method, tiny_folder, capsys):
    run = [method, "--model", str(tiny_folder), "--max_length", "64", "--use_cpu", "--json", "--use_peft"]
    sizes = []
    for rank in ("2", "4"):
        assert main([*run, "--lora_r", rank]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["gradients"])
    assert sizes[1] < 2 * sizes[0]


def test_what_has_no_shape_or_is_too_long_is_refused(tiny_folder, tiny_llama, tmp_path):
    get_peft_model(tiny_llama, LoraConfig(r=2)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"is an adapter.*name the model that it goes on"):
        main(["--model", str(tmp_path / "adapter"), "--use_cpu"])
    with pytest.raises(ValueError, match=r"estimate: rows have up to 9 tokens.*has learned 8 positions"):
        estimate(GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=8), batch_size=1, length=9)


def test_a_reward_model_has_no_logits():
    found = estimate(LLAMA, batch_size=1, length=8, task="SEQ_CLS")
    language = estimate(LLAMA, batch_size=1, length=8)
    assert found.logits == 0 < language.logits
    assert found.weights < language.weights or LLAMA.tie_word_embeddings
