"""The job of a text task: a language model trained by TRL with an algorithm of polopt."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from polopt.envs.text import TextTask
from polopt.ext.vllm.server import EngineSettings
from polopt.launch.job import COMMON, loss_names, processes, seed, strategy, task_names
from polopt.launch.llm_trainer import OURS, Batch, check_section, make_config
from polopt.launch.recipe import RecipeError, build, call, check_keys, complete
from polopt.losses import Algorithm

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

    from polopt.launch.run import Run

__all__ = ["Evaluation", "LlmJob", "ModelMaker", "prepare"]


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
    batch: Batch
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

    @property
    def ours(self) -> dict[str, bool]:
        """Keyword arguments for `PolicyTrainer` that the section `trainer` holds."""
        return {key: self.tree["trainer"][key] for key in OURS}

    def config(self, **owned: Any) -> "GRPOConfig":  # noqa: ANN401
        """Return TRL's config for this recipe.

        Raises:
            RecipeError: If TRL refuses a field, or one belongs to the algorithm.
        """
        return make_config(self.tree["trainer"], **owned)

    def check_inputs(self) -> None:
        """Refuse files of rows that are not here; see `Job`."""
        from polopt.launch.llm_data import check_files

        check_files(self.task)

    def check_here(self) -> None:
        """Refuse what this machine lacks, and rows that do not fit.

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
        config = make_config({**self.tree["trainer"], "per_device_train_batch_size": size})
        try:
            check_data(config, training_rows(self.task))
        except ValueError as error:
            raise RecipeError(f"task: {error}") from error

    def train(self, run: "Run") -> dict[str, Any]:
        """See `Job`."""
        from polopt.launch.llm_run import train

        return train(self, run)


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
    trainer, batch = check_section(tree["trainer"], world, spread, seed(tree), algorithm, task)
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
        return call(EngineSettings, tree.get("vllm") or {}, "vllm")
    if tree.get("vllm") is not None:
        raise RecipeError(
            "the section 'vllm' has no effect without trainer.use_vllm=true: set that, or leave "
            "the section out (vllm=null)"
        )
    return None
