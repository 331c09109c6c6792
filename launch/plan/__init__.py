"""What a training run needs on each GPU, phase by phase, before it is started.

Pure arithmetic on the numbers of a `config.json`: no weights are loaded, torch is not needed.
`polopt plan` prints it; `plan(setup)` returns it.
"""

from polopt.launch.plan.architecture import Architecture
from polopt.launch.plan.gpus import Gpu, find_gpu
from polopt.launch.plan.phases import Phase, Plan, plan
from polopt.launch.plan.setup import Setup

__all__ = ["Architecture", "Gpu", "Phase", "Plan", "Setup", "find_gpu", "plan"]
