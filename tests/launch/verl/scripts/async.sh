python3 -m verl.experimental.fully_async_policy.fully_async_main \
  algorithm.adv_estimator=grpo data.train_files=/d/t.parquet data.val_files=/d/v.parquet \
  data.train_batch_size=64 actor_rollout_ref.model.path=/m/q \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 trainer.nnodes=1 trainer.n_gpus_per_node=4 rollout.nnodes=1 \
  rollout.n_gpus_per_node=4 async_training.staleness_threshold=0.1
