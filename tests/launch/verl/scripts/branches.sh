#!/bin/bash
SIZE=${1:-small}
shift 2>/dev/null || true
case "$SIZE" in
  small) MODEL=/m/0.6b; TP=1; MICRO=16 ;;
  large) MODEL=/m/32b; TP=4; MICRO=2 ;;
  *) echo "unknown size $SIZE" >&2; exit 1 ;;
esac
ARGS=(
  algorithm.adv_estimator=grpo
  data.train_files=/d/t.parquet
  data.val_files=/d/v.parquet
)
if [[ "$SIZE" == "large" ]]; then
  ARGS+=(actor_rollout_ref.actor.fsdp_config.param_offload=True)
else
  ARGS+=(actor_rollout_ref.actor.fsdp_config.param_offload=False)
fi
[ -n "${WANDB_API_KEY:-}" ] && LOGGER="['console','wandb']" || LOGGER="['console']"
launch() {
  python3 -m verl.trainer.main_ppo "${ARGS[@]}" "$@"
}
launch data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$MICRO \
  actor_rollout_ref.model.path=$MODEL actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.tensor_model_parallel_size=$TP \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.logger="$LOGGER" trainer.total_epochs=1 "$@"
