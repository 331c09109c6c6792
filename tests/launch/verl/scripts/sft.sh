torchrun --standalone --nnodes=1 --nproc_per_node=8 \
     -m verl.trainer.sft_trainer \
    data.train_files=/d/train.parquet \
    data.val_files=/d/test.parquet \
    data.micro_batch_size_per_gpu=4 \
    optim.lr=1e-4 \
    model.partial_pretrain=/m/q \
    trainer.project_name=sft \
    trainer.total_epochs=4 $@
