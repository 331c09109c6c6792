"""The job of a text task: a language model trained by TRL with an algorithm of polopt."""

import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from polopt.envs.text import TextTask
from polopt.ext.vllm.server import EngineSettings
from polopt.launch.job import COMMON, loss_names, processes, seed, strategy, task_names
from polopt.launch.peers import make_group
from polopt.launch.recipe import RecipeError, build, call, check_keys, complete
from polopt.losses import Algorithm

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

    from polopt.launch.run import Run

__all__ = ["Evaluation", "LlmJob", "ModelMaker", "prepare"]

_OWNED = {
    "output_dir": "checkpoints go into the run folder",
    "seed": "set the recipe's 'seed'",
    "disable_tqdm": "the run shows its own progress",
    "resume_from_checkpoint": "use polopt train --resume RUN",
    "model_init_kwargs": "set them in 'model'",
    "use_cpu": "a GPU is used where there is one",
    "num_generations_eval": "evaluation is the section 'evaluation'",
    "eval_strategy": "evaluation is the section 'evaluation'",
    "eval_on_start": "the run evaluates before training, see the section 'evaluation'",
}


@runtime_checkable
class ModelMaker(Protocol):
    """What the section `model` builds; cheap to build, the work is in `make`."""

    def make(self, task: TextTask, progress: Callable[[float, float, str], None]) -> Any:  # noqa: ANN401
        """Return a folder or hub name that transformers can load model and tokenizer from.

        Args:
            task: What the model is for.
            progress: May be told how much of the work is done, of how much, and a text.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and on what the policy is evaluated, besides before and after training.

    Attributes:
        every: Optimizer steps between evaluations, or none.
        problems: Held-out problems used, at most; all by default.
        samples: Answers drawn per problem, besides the greedy one. With several there are
            pass@k and majority@n as well.
    """

    every: int | None = None
    problems: int | None = None
    samples: int = 1

    def __post_init__(self) -> None:
        for name in ("every", "problems", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or none, got {value}")


@dataclass(frozen=True, kw_only=True)
class LlmJob:
    """A checked recipe for a language model; see `polopt.launch.job.Job`."""

    name: str
    tree: dict[str, Any]
    processes: int
    task: TextTask
    algorithm: Algorithm
    model: ModelMaker
    evaluation: Evaluation
    batch: "Batch"
    trim_padding: bool
    engine: EngineSettings | None = None
    strategy: str | None = None

    def arithmetic(self) -> dict[str, Any]:
        """See `Job`."""
        b = self.batch
        per_step = b.per_device * b.accumulation * self.processes
        return {
            "processes": self.processes,
            "training_problems": len(self.task.train),
            "evaluation_problems": len(self.task.evaluation),
            "answers_per_problem": b.group,
            "answers_per_optimizer_step": per_step,
            "answers_per_generation": b.per_generation(self.processes),
            "problems_per_generation": b.per_generation(self.processes) // b.group,
            "optimizer_steps_per_generation": b.generate * b.iterations / b.accumulation,
            "tokens_per_answer_at_most": b.max_length,
            "further_generation_rounds_at_most": (
                self.algorithm.sampling.max_rounds if self.algorithm.sampling.refill else 0
            ),
        }

    def config(self, **owned: Any) -> "GRPOConfig":  # noqa: ANN401
        """Return TRL's config for this recipe.

        Raises:
            RecipeError: If TRL refuses a field, or one belongs to the algorithm.
        """
        return _config(self.tree["trainer"], **owned)

    def check_here(self) -> None:
        """Refuse what this machine lacks.

        Raises:
            RecipeError: If a library or a folder is missing.
        """
        from transformers.integrations.integration_utils import (
            get_available_reporting_integrations,
        )

        from polopt.ext.trl.models import Pretrained, TinyQwen3, cache_folder
        from polopt.ext.trl.stored import GGUF

        self._check_rows()
        if isinstance(self.model, TinyQwen3):
            try:
                self.model.check(self.task)
            except ValueError as error:
                raise RecipeError(f"model: {error}") from error
        zero = str(self.strategy).startswith("zero")
        if zero and importlib.util.find_spec("deepspeed") is None:
            raise RecipeError(
                f"'launch.strategy' {self.strategy} needs DeepSpeed, which is not installed: pip "
                "install deepspeed, or take fsdp2"
            )
        trainer = self.tree["trainer"]
        if trainer.get("use_vllm") and importlib.util.find_spec("vllm") is None:
            raise RecipeError("'trainer.use_vllm' needs vLLM: pip install 'polopt[vllm]'")
        trackers = trainer["report_to"]
        trackers = {trackers} if isinstance(trackers, str) else {*trackers}
        missing = sorted(trackers - {"none", "all", *get_available_reporting_integrations()})
        if missing:
            raise RecipeError(
                f"'trainer.report_to' names {missing[0]!r}, which is not installed: pip install "
                f"{missing[0]}, or leave it out"
            )
        if isinstance(self.model, Pretrained):
            try:
                self.model.check()
            except ValueError as error:
                raise RecipeError(f"'model.path' {error}") from error
            if not self.model.path.endswith(GGUF):
                return
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(
                f"the cache folder {cache_folder()} cannot be made ({error.strerror}): set "
                "POLOPT_CACHE to a folder that can be written"
            ) from error

    def _check_rows(self) -> None:
        """Read the rows, and refuse too few of them: some may have been dropped."""
        from polopt.ext.trl.config import check_data
        from polopt.launch.llm_data import check_rows, training_rows

        if check_rows(self.task) is None:
            return
        size = self.batch.per_device * self.processes
        config = _config({**self.tree["trainer"], "per_device_train_batch_size": size})
        try:
            check_data(config, training_rows(self.task))
        except ValueError as error:
            raise RecipeError(f"task: {error}") from error

    def train(self, run: "Run") -> dict[str, Any]:
        """See `Job`."""
        from polopt.launch.llm_run import train

        return train(self, run)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How TRL cuts batches, in answers.

    Attributes:
        per_device: In one micro-batch of one process.
        accumulation: Micro-batches in an optimizer step.
        generate: Micro-batches generated at a time.
        iterations: Passes over what was generated.
        group: Answers to each problem.
        max_length: Tokens in an answer, at most.
    """

    per_device: int
    accumulation: int
    generate: int
    iterations: int
    group: int
    max_length: int

    def per_generation(self, world: int) -> int:
        """Return how many answers are generated at a time on all processes."""
        return self.per_device * self.generate * world

    def check(self, world: int) -> None:
        """Refuse batches that do not hold whole groups.

        Raises:
            RecipeError: With the numbers and what to change.
        """
        if self.group < 2:
            raise RecipeError(
                f"'trainer.num_generations' must be at least 2, got {self.group}: a group of "
                "one answer has nothing to compare with"
            )
        whole = self.per_generation(world)
        if whole % self.group:
            raise RecipeError(
                f"the generation batch of {whole} answers (per_device_train_batch_size "
                f"{self.per_device} * steps_per_generation {self.generate} * processes {world}) is "
                f"not divisible by 'trainer.num_generations' {self.group}: change one of them"
            )


def prepare(tree: dict[str, Any], *, name: str) -> LlmJob:
    """Check a recipe for a text task and return its job.

    Args:
        tree: The recipe, whose common sections `polopt.launch.job.prepare` has checked.
        name: Names the run.

    Raises:
        RecipeError: If the recipe is wrong.
    """
    check_keys(tree, (*COMMON, "model", "trainer", "evaluation", "vllm"))
    for section in ("model", "algorithm", "trainer"):
        if not isinstance(tree.get(section), dict):
            raise RecipeError(f"a text task needs the section {section!r}, a mapping of settings")
    world, names = processes(tree), loss_names()
    task = build(tree["task"], task_names(), "task")
    algorithm = build(tree["algorithm"], names, "algorithm")
    if not isinstance(algorithm, Algorithm):
        raise RecipeError(
            f"'algorithm' must build an Algorithm, such as dapo, got {type(algorithm).__name__}"
        )
    from polopt.ext.trl.models import Pretrained, TinyQwen3

    makers = {"tiny_qwen3": TinyQwen3, "pretrained": Pretrained}
    model = build(tree["model"], makers, "model")
    if not isinstance(model, ModelMaker):
        raise RecipeError(
            "'model' must build something with a method make(task, progress), "
            f"got {type(model).__name__}"
        )
    if isinstance(model, Pretrained) and model.lora is not None:
        # peft takes any type; of `init_lora_weights` it takes names that its annotation lacks.
        typed = {key: value for key, value in model.lora.items() if key != "init_lora_weights"}
        call(type(model.adapter()), typed, "model.lora")
    evaluation = call(Evaluation, tree.get("evaluation", {}), "evaluation")
    engine = _engine(tree)
    spread = strategy(tree)
    trainer, batch = _trainer(tree["trainer"], world, spread, seed(tree), algorithm, task)
    tree = {
        **tree,
        "model": complete(tree["model"], makers, "model"),
        "trainer": trainer,
        "evaluation": asdict(evaluation),
        "launch": {"processes": world, **({"strategy": spread} if spread else {})},
        **({} if engine is None else {"vllm": asdict(engine)}),
    }
    return LlmJob(
        name=name,
        tree=tree,
        processes=world,
        task=task,
        algorithm=algorithm,
        model=model,
        evaluation=evaluation,
        batch=batch,
        trim_padding=trainer["trim_padding"],
        engine=engine,
        strategy=spread,
    )


def _engine(tree: Mapping[str, Any]) -> EngineSettings | None:
    """Return how vLLM is started, or None where transformers generates."""
    used = tree["trainer"].get("use_vllm", False)
    if not isinstance(used, bool):
        raise RecipeError(f"'trainer.use_vllm' must be true or false, got {used!r}")
    mode = tree["trainer"].get("vllm_mode", "colocate")
    if mode not in ("colocate", "server"):
        raise RecipeError(f"'trainer.vllm_mode' must be colocate or server, got {mode!r}")
    if used:
        return call(EngineSettings, tree.get("vllm", {}), "vllm")
    if "vllm" in tree:
        raise RecipeError(
            "the section 'vllm' has no effect without trainer.use_vllm=true: set that, or leave "
            "the section out"
        )
    return None


def _trainer(
    given: Mapping[str, Any],
    world: int,
    spread: str | None,
    seed: int,
    algorithm: Algorithm,
    task: TextTask,
) -> tuple[dict[str, Any], Batch]:
    """Return the section with this job's defaults, and its batch sizes, after checking both."""
    import torch
    from trl.trainer.grpo_config import GRPOConfig

    from polopt.ext.trl.config import (
        check_algorithm,
        check_data,
        check_sampling,
        check_windows,
        selects,
    )

    for key, reason in _OWNED.items():
        if key in given:
            raise RecipeError(f"'trainer.{key}' cannot be set here: {reason}")
    check_keys(given, (*GRPOConfig.__dataclass_fields__, "trim_padding"), "trainer")
    defaults = {"logging_steps": 10, "report_to": "none", "save_total_limit": 2,
                "trim_padding": True}  # fmt: skip
    if not torch.cuda.is_available():
        defaults |= {"bf16": False, "dataloader_pin_memory": False}
    if spread == "fsdp2":
        # Else each process keeps gradients of the whole model while it accumulates.
        defaults["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    trainer = {**defaults, **given}

    if not isinstance(trainer["trim_padding"], bool):
        raise RecipeError(
            f"'trainer.trim_padding' must be true or false, got {trainer['trim_padding']!r}"
        )

    # TRL checks batches against the processes that run now, and at first one plans for all.
    def number(key: str, default: int) -> int:
        value = trainer.get(key) if trainer.get(key) is not None else default
        if type(value) is not int or value < 1:
            raise RecipeError(f"'trainer.{key}' must be a whole number from 1, got {value!r}")
        return value

    accumulation = number("gradient_accumulation_steps", 1)
    per_device = number("per_device_train_batch_size", 8)
    generate = number("steps_per_generation", accumulation)
    if trainer.get("generation_batch_size") is not None:
        if trainer.get("steps_per_generation") is not None:
            raise RecipeError(
                "'trainer.generation_batch_size' and 'trainer.steps_per_generation' say the same "
                "thing: set one of them"
            )
        generate = number("generation_batch_size", 1) // (per_device * world)
        if generate * per_device * world != trainer["generation_batch_size"]:
            raise RecipeError(
                f"'trainer.generation_batch_size' {trainer['generation_batch_size']} must be a "
                f"multiple of per_device_train_batch_size {per_device} * processes {world}"
            )
    batch = Batch(
        per_device=per_device,
        accumulation=accumulation,
        generate=generate,
        iterations=number("num_iterations", 1),
        group=number("num_generations", 8),
        max_length=number("max_completion_length", 512),
    )
    batch.check(world)
    weights = trainer.get("reward_weights")
    fits = isinstance(weights, list) and len(weights) == len(task.rewards)
    if weights is not None and not (fits and all(map(_is_finite, weights))):
        raise RecipeError(
            f"'trainer.reward_weights' must have one finite number for each of the task's "
            f"{len(task.rewards)} rewards, got {weights}"
        )
    config = _config({**trainer, "per_device_train_batch_size": per_device * world}, seed=seed)
    trainer.setdefault("save_strategy", "steps")
    # Only between generations a checkpoint resumes exactly.
    cycle = max(batch.generate * batch.iterations // batch.accumulation, 1)
    trainer.setdefault("save_steps", cycle * -(-100 // cycle))
    try:
        check_algorithm(algorithm)
        check_sampling(config, algorithm, task.train, world)
        zero = str(spread).startswith("zero")
        check_windows(config, deepspeed=zero, selects=selects(algorithm))
    except ValueError as error:
        raise RecipeError(f"algorithm: {error}") from error
    try:
        check_data(config, task.train)
    except ValueError as error:  # of rows that cannot be counted, too
        raise RecipeError(f"task: {error}") from error
    return trainer, batch


def _config(trainer: Mapping[str, Any], **owned: Any) -> "GRPOConfig":  # noqa: ANN401
    import torch
    from trl.trainer.grpo_config import GRPOConfig

    from polopt.ext.trl.config import check_config

    known = GRPOConfig.__dataclass_fields__
    values = {
        "output_dir": "unused",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        **{key: value for key, value in owned.items() if key in known},
        **{key: value for key, value in trainer.items() if key != "trim_padding"},
    }
    with warnings.catch_warnings():  # TRL still uses names that transformers renames
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        if values["use_cpu"]:
            make_group(values.get("ddp_timeout", known["ddp_timeout"].default))
        config = call(GRPOConfig, values, "trainer")
    _check_ranges(config)
    try:
        check_config(config)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return config


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check_ranges(config: "GRPOConfig") -> None:
    """Refuse numbers that TRL takes and then fails on, or silently trains nothing with.

    Raises:
        RecipeError: With the field, its value and what it may be.
    """
    least_zero = {"learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"}
    positive = {"temperature", "top_p", "num_train_epochs", "save_steps", "logging_steps",
                "ddp_timeout"}  # fmt: skip
    for key in (*least_zero, *positive):
        value = getattr(config, key)
        if not isinstance(value, int | float):
            continue
        if not math.isfinite(value) or value < 0 or (key in positive and value == 0):
            wanted = "positive" if key in positive else "at least 0"
            raise RecipeError(f"'trainer.{key}' must be finite and {wanted}, got {value}")
    if config.top_p > 1:
        raise RecipeError(f"'trainer.top_p' must be in (0, 1], got {config.top_p}")
    if config.max_steps < 1 and config.max_steps != -1:
        raise RecipeError(f"'trainer.max_steps' must be at least 1, got {config.max_steps}")
