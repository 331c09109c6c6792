ARGS="algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False"
ARGS="$ARGS actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"
ARGS="$ARGS actor_rollout_ref.actor.loss_scale_factor=3000"
ARGS="$ARGS actor_rollout_ref.actor.use_kl_loss=False"
python3 -m verl.trainer.main_ppo $ARGS \
  data.train_files=/d/t.parquet data.val_files=/d/v.parquet data.train_batch_size=128 \
  data.max_response_length=3000 actor_rollout_ref.model.path=/m/q \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_training_steps=500 trainer.save_freq=100
