import pytest

from polopt.launch.plan.architecture import load
from polopt.launch.plan.gpus import find_gpu
from polopt.launch.plan.setup import Setup


@pytest.fixture
def guide():
    """Return the tuning guide's run: Qwen3-32B by verl on four nodes of eight."""

    def make(**changes):
        settings = {
            "model": load("qwen3-32b"),
            "gpu": find_gpu("H100-80"),
            "gpus": 32,
            "engine": "verl",
            "sharding": "fsdp",
            "tensor_parallel": 4,
            "sequence_parallel": 4,
            "micro_batch": 8,
            "prompt_length": 2048,
            "completion_length": 2048,
            "head": "full",
            "vllm_memory": 0.7,
            "parameter_offload": True,
            "reference": True,
            "max_batched_tokens": 32768,
            "prompts_per_rollout": 1024,
            "num_generations": 4,
            "completions_per_step": 256,
            "rows": 7473,
            "epochs": 50.0,
        }
        return Setup(**settings | changes)

    return make
