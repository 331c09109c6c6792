#!/bin/sh
N=4
python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=reinforce_plus_plus_baseline \
  data.train_files=/d/t.parquet \
  data.val_files=/d/v.parquet \
  data.train_batch_size=128 \
  data.max_prompt_length=512 \
  data.max_response_length=512 \
  actor_rollout_ref.model.path=/m/qwen \
  actor_rollout_ref.actor.optim.lr=2E-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=.01 \
  actor_rollout_ref.actor.kl_loss_type=mse \
  actor_rollout_ref.rollout.n=$N \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  trainer.logger=console \
  trainer.n_gpus_per_node=2 \
  trainer.nnodes=1 \
  trainer.save_freq=50 \
  trainer.total_epochs=1
