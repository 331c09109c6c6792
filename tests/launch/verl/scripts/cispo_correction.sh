python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.rollout_correction.rollout_is=token \
  algorithm.rollout_correction.rollout_is_threshold=2.0 \
  actor_rollout_ref.actor.policy_loss.loss_mode=cispo \
  actor_rollout_ref.actor.clip_ratio_low=1.0 \
  actor_rollout_ref.actor.clip_ratio_high=4.0 \
  actor_rollout_ref.actor.optim.lr_scheduler_type=cosine \
  actor_rollout_ref.actor.optim.min_lr_ratio=0.1 \
  actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \
  data.train_files=/d/t.parquet data.val_files=/d/v.parquet data.train_batch_size=64 \
  actor_rollout_ref.model.path=/m/q \
  actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_epochs=2 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
  +actor_rollout_ref.rollout.engine_kwargs.vllm.enforce_eager=True \
  +data.apply_chat_template_kwargs.enable_thinking=False \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.total_epochs=2 trainer.save_freq=5
