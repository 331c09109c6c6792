"""TRL: the GRPO trainer with the losses and advantages of `polopt.losses`."""
