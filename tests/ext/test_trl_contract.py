"""The seams in TRL that PolicyTrainer hangs on; one that moved fails here by name."""

import inspect

import pytest

trl = pytest.importorskip("trl")
from trl import GRPOConfig, GRPOTrainer

from polopt.ext.trl.config import LOSS_FIELDS
from polopt.ext.trl.sampling import _COMPLETIONS, _EXTRA, _IDS, _IMAGES

SOURCE = inspect.getsource(GRPOTrainer)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("_compute_loss", ["self", "model", "inputs"]),
        ("_prepare_inputs", ["self", "generation_batch"]),
        ("_generate", ["self", "prompts"]),
        ("_generate_and_score_completions", ["self", "inputs"]),
        (
            "_calculate_rewards",
            ["self", "inputs", "prompts", "completions", "completion_ids_list"],
        ),
        ("training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        ("_load_optimizer_and_scheduler", ["self", "checkpoint"]),
        ("_save_checkpoint", ["self", "model", "trial"]),
        ("_get_output_dir", ["self", "trial"]),
        ("_push_from_checkpoint", ["self", "checkpoint_folder"]),
        ("_finish_current_push", ["self"]),
        ("init_hf_repo", ["self", "token", "private"]),
        ("create_model_card", ["self", "model_name", "dataset_name", "tags"]),
        ("_load_from_checkpoint", ["self", "resume_from_checkpoint", "model"]),
    ],
)
def test_method(method, parameters):
    function = inspect.unwrap(getattr(GRPOTrainer, method))
    assert list(inspect.signature(function).parameters) == parameters


def test_log_probs_take_what_is_passed():
    function = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies)
    function.bind(None, "model", "ids", "mask", 3, compute_entropy=True, batch_size=2)
    # Where TRL calls it without gradient, the first four are positional and the size is named.
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._generate_and_score_completions))
    calls = source.count("self._get_per_token_logps_and_entropies(")
    assert calls == 3
    assert source.count("batch_size=batch_size,") == calls


def test_a_turn_returns_ids_and_log_probs():
    *_, last = inspect.getsource(inspect.unwrap(GRPOTrainer._generate_single_turn)).split("return ")
    assert last.strip() == "completion_ids, logprobs"


def test_a_checkpoint_goes_where_the_output_folder_is():
    """Ours is staged: Trainer asks for the folder once, and removes older ones after writing."""
    from transformers import Trainer

    source = inspect.getsource(Trainer._save_checkpoint)
    assert source.count("self._get_output_dir(trial=trial)") == 1
    assert source.index("rotate_checkpoints(") > source.index("self.state.save_to_json(")
    assert "output_dir=run_dir" in source


def test_the_table_of_completions():
    for column in ("prompt", "completion", "rewards", "advantages", "extra"):
        assert f'self._logs["{column}"]' in SOURCE


def test_generate_returns_lists_in_this_order():
    *_, last = inspect.getsource(inspect.unwrap(GRPOTrainer._generate)).rstrip().split("\n")
    names = last.strip().removeprefix("return ").split(", ")
    assert len(names) == 8
    assert names[0] == "prompt_ids"
    assert names[_IDS] == "completion_ids"
    assert names[_COMPLETIONS] == "completions"
    assert names[_EXTRA] == "extra_fields"
    assert names[_IMAGES] == "images"


def test_answers_can_be_had_alone():
    """Our `_generate` leaves TRL's method when it has them: nothing may be logged before."""
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._generate_and_score_completions))
    assert source.count("self._generate(prompts)") == 1
    before = source[: source.index("self._generate(prompts)")]
    assert "self.environments = []" in before
    assert "self._metrics" not in before
    assert "self._step" not in before


def test_the_old_policy_is_scored_before_the_reference():
    """Entropies are taken from the first pass where there is an old policy."""
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._generate_and_score_completions))
    call = "_per_token_logps, _, _ = self._get_per_token_logps_and_entropies("
    assert source.index(f"old{call}") < source.index(f"ref{call}")


def test_the_reference_is_scored_only_with_a_weight():
    from trl.trainer.utils import use_adapter

    source = inspect.getsource(inspect.unwrap(GRPOTrainer._generate_and_score_completions))
    scored = source.index("self.ref_model,\n")
    assert source[:scored].rstrip().endswith("self._get_per_token_logps_and_entropies(")
    assert "if self.beta != 0.0:" in source[:scored]
    assert list(inspect.signature(use_adapter).parameters) == ["model", "adapter_name"]


@pytest.mark.parametrize(
    "name",
    [
        "_buffered_inputs",
        "beta",
        "ref_model",
        "temperature",
        "_step",
        "_metrics",
        "_pending_extra_logs",
        "_pending_metrics",
        "_tokenizer",
        "eos_token_ids",
        "generation_config",
        "reward_func_names",
        "reward_processing_classes",
        "pad_to_multiple_of",
        "reward_weights",
        "num_generations",
        "num_generations_eval",
        "num_iterations",
        "aux_loss_enabled",
    ],
)
def test_attribute(name):
    assert f"self.{name} =" in SOURCE


@pytest.mark.parametrize(
    "key",
    [
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "advantages",
        "old_per_token_logps",
        "ref_per_token_logps",
        "sampling_per_token_logps",
        "tool_mask",
    ],
)
def test_entry_of_the_generation_batch(key):
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._generate_and_score_completions))
    assert f'"{key}"' in source


def test_loss_is_not_scaled_again():
    """Trainer would divide by the accumulation steps; TRL has had two ways to stop it."""
    flag = getattr(GRPOTrainer, "loss_is_scaled_for_ga", None)
    assert flag is True or "compute_loss_func=" in SOURCE


def test_every_loss_field_is_known():
    """A field that a new TRL adds is either about the loss, and refused, or in this list."""
    others = {
        "model_init_kwargs", "trust_remote_code", "disable_dropout", "cast_lm_head_to_fp32",
        "num_generations", "num_generations_eval", "max_completion_length",
        "ds3_gather_for_generation", "shuffle_dataset", "pad_to_multiple_of",
        "generation_batch_size", "steps_per_generation", "temperature", "top_p", "top_k", "min_p",
        "generation_kwargs", "chat_template_kwargs", "repetition_penalty", "cache_implementation",
        "use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode",
        "vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host",
        "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
        "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size",
        "num_iterations", "reward_weights", "sync_ref_model", "ref_model_mixup_alpha",
        "ref_model_sync_steps", "max_tool_calling_iterations", "log_completions",
        "log_multimodal", "num_completions_to_print", "log_unique_prompts",
        "log_completions_hub_repo", "use_transformers_continuous_batching",
        "transformers_continuous_batching_config", "use_transformers_paged",
    }  # fmt: skip
    from transformers import TrainingArguments

    fields = set(GRPOConfig.__dataclass_fields__) - set(TrainingArguments.__dataclass_fields__)
    assert fields - others <= set(LOSS_FIELDS)
