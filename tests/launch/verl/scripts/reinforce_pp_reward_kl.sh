python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=1.0 \
  algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.kl_coef=0.001 \
  data.train_files=/d/t.parquet data.val_files=/d/v.parquet data.train_batch_size=128 \
  actor_rollout_ref.model.path=/m/qwen actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.name=vllm \
  trainer.logger=console trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.total_training_steps=10
