python3 -m verl.trainer.main_ppo \
 algorithm.adv_estimator=grpo data.train_files=/d/t.parquet data.val_files=/d/v.parquet \
 data.train_batch_size=16 data.max_prompt_length=512 data.max_response_length=512 \
 actor_rollout_ref.model.path=/m/q actor_rollout_ref.model.lora_rank=64 \
 actor_rollout_ref.model.lora_alpha=32 actor_rollout_ref.model.target_modules=all-linear \
 actor_rollout_ref.actor.optim.lr=3e-5 actor_rollout_ref.actor.ppo_mini_batch_size=16 \
 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.name=vllm \
 actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.n=4 \
 actor_rollout_ref.rollout.layered_summon=True trainer.n_gpus_per_node=2 trainer.nnodes=1
