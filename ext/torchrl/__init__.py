"""TorchRL: collectors, advantage transforms and training over `polopt.losses`."""
