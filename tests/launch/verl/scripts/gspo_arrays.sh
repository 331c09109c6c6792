#!/usr/bin/env bash
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-30B-A3B-Base}
N_GPU=${N_GPU:-8}

DATA=(
    data.train_files=/data/code/train.parquet   # own split
    data.val_files=/data/code/valid.parquet

    data.train_batch_size=128
    data.max_prompt_length=1024
    data.max_response_length=4096
)

ACTOR=(
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.clip_ratio_low=3e-4
    actor_rollout_ref.actor.clip_ratio_high=4e-4
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
)

ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
)

TRAINER=(trainer.nnodes=2 trainer.n_gpus_per_node="$N_GPU" trainer.logger=console)
TRAINER+=(trainer.save_freq=-1 trainer.test_freq=10 trainer.total_training_steps=100)

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "$@"
