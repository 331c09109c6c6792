#!/bin/bash
for LR in 1e-6 3e-6 1e-5; do
  for SEED in 1 2; do
    nohup python3 -m verl.trainer.main_ppo \
      algorithm.adv_estimator=grpo data.train_files=/d/t.parquet data.val_files=/d/v.parquet \
      data.train_batch_size=32 data.seed=$SEED actor_rollout_ref.actor.optim.lr=$LR \
      actor_rollout_ref.model.path=/m/q actor_rollout_ref.actor.ppo_mini_batch_size=32 \
      actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.name=vllm \
      actor_rollout_ref.rollout.n=4 trainer.n_gpus_per_node=1 trainer.nnodes=1 \
      actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
      trainer.experiment_name="lr${LR}_s${SEED}" trainer.total_epochs=1 \
      > "log_${LR}_${SEED}.txt" 2>&1
  done
done
