python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=/d/t.parquet data.val_files=/d/v.parquet data.train_batch_size=64 \
    actor_rollout_ref.model.path=/m/q \
    actor_rollout_ref.actor.clip_ratio=0.1 \
    actor_rollout_ref.actor.grad_clip=0.5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size=32 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size=64 \
    actor_rollout_ref.ref.log_prob_micro_batch_size=64 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \
    reward_model.reward_manager=naive \
    custom_reward_function.path=./my_reward.py custom_reward_function.name=score \
    trainer.n_gpus_per_node=4 trainer.nnodes=1 trainer.total_epochs=1
