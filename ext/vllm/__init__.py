"""Weights from a trainer to vLLM, on any device and host: engines, plugin, client, TRL's seam."""
