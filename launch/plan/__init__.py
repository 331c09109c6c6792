"""What a training run needs on each GPU, phase by phase: arithmetic, no weights are loaded."""
