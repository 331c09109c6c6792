python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
  actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov \
  actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.002 \
  actor_rollout_ref.actor.policy_loss.ppo_kl_coef=1.0 \
  data.train_files=/d/t.parquet data.val_files=/d/v.parquet data.train_batch_size=64 \
  actor_rollout_ref.model.path=/m/q actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=1
