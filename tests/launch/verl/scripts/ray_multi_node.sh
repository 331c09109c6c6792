#!/usr/bin/env bash
set -euo pipefail
RAY_ADDRESS=${RAY_ADDRESS:-"http://localhost:8265"}
WORKING_DIR=${WORKING_DIR:-"${PWD}"}
RUNTIME_ENV=${RUNTIME_ENV:-"${WORKING_DIR}/runtime_env.yaml"}
NNODES=${NNODES:?number of nodes}
EXP=grpo_$(date +%Y%m%d)_n${NNODES}

ray job submit --no-wait --runtime-env="${RUNTIME_ENV}" \
    --working-dir "${WORKING_DIR}" \
    -- python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="${WORKING_DIR}/data/t.parquet" \
    data.val_files="${WORKING_DIR}/data/v.parquet" \
    data.train_batch_size=1024 \
    data.max_prompt_length=1024 data.max_response_length=3072 \
    actor_rollout_ref.model.path="${WORKING_DIR}/model" \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.fsdp_config.fsdp_size=8 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    trainer.experiment_name="${EXP}" \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes="${NNODES}" \
    trainer.save_freq=10 trainer.test_freq=-1 trainer.total_epochs=2
