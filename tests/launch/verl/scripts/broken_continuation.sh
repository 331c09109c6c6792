python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=/d/t.parquet \
    data.val_files=/d/v.parquet \
    data.train_batch_size=128 \
    actor_rollout_ref.model.path=/m/q \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=4 \
    # actor_rollout_ref.rollout.n=8 \
    trainer.n_gpus_per_node=4 \
    trainer.total_epochs=5
