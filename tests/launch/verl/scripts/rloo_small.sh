MODEL=~/models/tiny-llama
python -m verl.trainer.main_ppo algorithm.adv_estimator=rloo \
 data.train_files="['/d/a.parquet','/d/b.parquet']" data.val_files="['/d/v.parquet']" \
 data.train_batch_size=64 data.max_prompt_length=256 data.max_response_length=256 \
 actor_rollout_ref.model.path=$MODEL actor_rollout_ref.actor.optim.lr=5e-7 \
 actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
 actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=1e-3 \
 actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \
 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
 trainer.logger=[console] trainer.project_name=rl trainer.experiment_name=rloo \
 trainer.n_gpus_per_node=4 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=3
