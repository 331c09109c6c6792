# tools need turns
ulimit -n 65535
PROJECT_DIR="$(pwd)"
CONFIG_PATH="$PROJECT_DIR/config"
python3 -m verl.trainer.main_ppo \
    --config-path="$CONFIG_PATH" \
    --config-name='tool_grpo' \
    algorithm.adv_estimator=grpo \
    data.train_files=$HOME/d/train.parquet \
    data.val_files=$HOME/d/test.parquet \
    data.train_batch_size=64 \
    data.return_raw_chat=True \
    actor_rollout_ref.model.path=/m/q \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.multi_turn.enable=True \
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$PROJECT_DIR/tools.yaml" \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 $@
