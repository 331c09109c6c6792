"""Batch arithmetic: verl counts prompts, TRL counts completions."""

from dataclasses import dataclass
from math import gcd

from polopt.launch.verl.plan import Plan
from polopt.launch.verl.schema import VERSION

__all__ = ["Batch", "convert_batch", "known_rows"]

_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_ROWS = {"gsm8k": 7473}  # training rows of data sets that are recognised by their path


@dataclass(frozen=True)
class Batch:
    """The sizes of an import.

    Attributes:
        world: Processes, one per GPU.
        prompts: Prompts per rollout.
        generations: Completions per prompt.
        mini_prompts: Prompts per optimizer step.
        passes: Passes over a rollout.
        per_device: Completions per forward and process.
    """

    world: int
    prompts: int
    generations: int
    mini_prompts: int
    passes: int
    per_device: int

    @property
    def accumulation(self) -> int:
        """Forwards per optimizer step and process."""
        return self.mini_prompts * self.generations // (self.per_device * self.world)

    @property
    def steps_per_generation(self) -> int:
        """Forwards per rollout and process."""
        return self.prompts * self.generations // (self.per_device * self.world)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per rollout: the factor between verl's steps and TRL's."""
        return self.passes * self.prompts // self.mini_prompts


def known_rows(paths: list[str]) -> int | None:
    """Rows of the training data, where the path tells."""
    found = [rows for name, rows in _ROWS.items() if len(paths) == 1 and name in paths[0].lower()]
    return found[0] if found else None


def convert_batch(plan: Plan) -> Batch:
    """Derive the sizes and write them to the plan."""
    world = plan.integer("trainer.nnodes", low=1) * plan.integer("trainer.n_gpus_per_node", low=1)
    generations = plan.integer(_ROLLOUT + "n", low=1)
    prompts, mini = _prompts(plan, world, generations)
    passes = plan.integer(_ACTOR + "ppo_epochs", low=1)
    shards = max(
        plan.integer(_ACTOR + "ulysses_sequence_parallel_size", low=1),
        plan.integer(_ACTOR + "fsdp_config.ulysses_sequence_parallel_size", low=1),
    )
    if world % shards:
        item = plan.override(_ACTOR + "ulysses_sequence_parallel_size")
        where = f"line {item.line}: " if item else ""
        plan.refusals.append(
            f"{where}{world} GPUs do not divide into sequence-parallel groups of {shards}"
        )
    wanted = _micro_batch(plan, world, shards)
    share = mini * generations // world
    per_device = max(d for d in range(1, min(wanted, share) + 1) if share % d == 0)
    batch = Batch(world, prompts, generations, mini, passes, per_device)
    _write(plan, batch, shards, wanted)
    return batch


def _prompts(plan: Plan, world: int, generations: int) -> tuple[int, int]:
    """Prompts per rollout and per optimizer step, made to divide if they do not."""
    prompts = plan.integer("data.train_batch_size", low=1)
    mini = plan.integer(_ACTOR + "ppo_mini_batch_size", low=1)
    fitting = mini if mini <= prompts else prompts
    unit = world // gcd(world, generations)
    fitting = -(-fitting // unit) * unit
    filled = max(round(prompts / fitting), 1) * fitting
    if (filled, fitting) == (prompts, mini):
        return prompts, mini
    reasons = []
    if mini > prompts:
        reasons.append(f"ppo_mini_batch_size {mini} exceeds train_batch_size {prompts}")
    elif prompts % mini:
        reasons.append(f"train_batch_size {prompts} is no multiple of ppo_mini_batch_size {mini}")
    if mini * generations % world:
        reasons.append(
            f"{mini} × {generations} completions per optimizer step do not divide over {world} "
            "processes (TRL has no sequence parallelism to share them)"
        )
    plan.refusals.append(
        f"{_where(plan)}{'; '.join(reasons) or 'the batch does not divide'}: the nearest sizes "
        f"that do are train_batch_size={filled}, ppo_mini_batch_size={fitting}"
    )
    return filled, fitting


def _where(plan: Plan) -> str:
    for name in (_ACTOR + "ppo_mini_batch_size", "data.train_batch_size"):
        item = plan.override(name)
        if item and item.line:
            return f"line {item.line}: "
    return ""


def _micro_batch(plan: Plan, world: int, shards: int) -> int:
    """Completions per forward and process that keep verl's tokens per GPU."""
    micro_key, legacy_key = _ACTOR + "ppo_micro_batch_size_per_gpu", _ACTOR + "ppo_micro_batch_size"
    dynamic = plan.flag(_ACTOR + "use_dynamic_bsz")
    length = plan.integer("data.max_prompt_length", low=1) + plan.integer(
        "data.max_response_length", low=1
    )
    micro, legacy = plan.optional_integer(micro_key), plan.optional_integer(legacy_key)
    budget_key = _ACTOR + "ppo_max_token_len_per_gpu"
    if dynamic:
        budget = plan.integer(budget_key, low=1)
        wanted = max(1, budget // length)
        how = f"⌊{budget} / ({length} = prompt + response)⌋ = {wanted} per process"
        plan.say(
            _ACTOR + "use_dynamic_bsz",
            "approximate",
            "trainer.per_device_train_batch_size",
            "TRL has fixed counts: worst-case lengths fill the budget, ragged batches leave "
            "it partly empty; the loss is the same",
        )
        plan.say(budget_key, "approximate", "trainer.per_device_train_batch_size", how)
        plan.say(micro_key, "no effect", "", "use_dynamic_bsz packs by tokens instead")
        plan.say(legacy_key, "no effect", "", "use_dynamic_bsz packs by tokens instead")
        return wanted
    plan.say(_ACTOR + "use_dynamic_bsz", "no effect", "", "off: micro-batches are counts")
    plan.say(budget_key, "no effect", "", "only read with use_dynamic_bsz=True")
    if micro:
        return max(1, micro // shards)
    if legacy:
        ranks = max(world // shards, 1)
        wanted = max(1, legacy // ranks // shards)
        plan.traps.append(
            f"ppo_micro_batch_size is the old global form, which verl {VERSION} does not read; "
            f"taken as {legacy} / {ranks} ranks"
        )
        plan.say(
            legacy_key,
            "converted",
            "trainer.per_device_train_batch_size",
            f"old global form: {legacy} / {ranks} ranks / {shards} = {wanted}",
        )
        return wanted
    plan.traps.append(
        "no micro-batch size is set (ppo_micro_batch_size_per_gpu or use_dynamic_bsz): verl stops, "
        "the recipe takes 1 per process"
    )
    return 1


def _write(plan: Plan, batch: Batch, shards: int, wanted: int) -> None:
    b, n, m = batch.prompts, batch.generations, batch.mini_prompts
    w, d = batch.world, batch.per_device
    trainer = plan.trainer
    trainer["per_device_train_batch_size"] = d
    trainer["gradient_accumulation_steps"] = batch.accumulation
    trainer["steps_per_generation"] = batch.steps_per_generation
    trainer["num_generations"] = n
    trainer["num_iterations"] = batch.passes
    plan.say(
        "data.train_batch_size",
        "converted",
        "trainer.steps_per_generation",
        f"{b} prompts × {n} = {b * n} completions per rollout = {d} × {w} processes × "
        f"{batch.steps_per_generation}",
    )
    plan.say(
        _ACTOR + "ppo_mini_batch_size",
        "converted",
        "trainer.gradient_accumulation_steps",
        f"{m} prompts × {n} = {m * n} completions per optimizer step = {d} × {w} processes × "
        f"{batch.accumulation}",
    )
    micro = plan.optional_integer(_ACTOR + "ppo_micro_batch_size_per_gpu")
    if not plan.flag(_ACTOR + "use_dynamic_bsz"):
        share = f"{micro} / {shards} (sequence-parallel group)" if shards > 1 else f"{micro}"
        note = "" if d == wanted else f", cut to {d}, the largest that divides {m * n} / {w}"
        plan.say(
            _ACTOR + "ppo_micro_batch_size_per_gpu",
            "converted" if d == wanted else "approximate",
            "trainer.per_device_train_batch_size",
            f"{share} = {wanted}{note}",
        )
    elif d != wanted:
        plan.say(
            _ACTOR + "ppo_max_token_len_per_gpu",
            "approximate",
            "trainer.per_device_train_batch_size",
            f"the budget holds {wanted}, cut to {d}, which divides {m * n} / {w} completions",
        )
    plan.say(_ROLLOUT + "n", "exact", "trainer.num_generations", "")
    plan.say(_ACTOR + "ppo_epochs", "exact", "trainer.num_iterations", "")
    _sequence_parallel(plan, shards, micro)
    plan.say(
        "trainer.nnodes",
        "exact",
        "accelerate.num_machines",
        "one accelerate launch per machine, with --machine_rank and --main_process_ip"
        if plan.integer("trainer.nnodes") > 1
        else "",
    )
    for name, target in (
        ("data.train_batch_size", "trainer.steps_per_generation"),
        (_ACTOR + "ppo_mini_batch_size", "trainer.gradient_accumulation_steps"),
        (_ROLLOUT + "n", "trainer.num_generations"),
        ("trainer.n_gpus_per_node", "accelerate.num_processes"),
        ("trainer.nnodes", "accelerate.num_machines"),
    ):
        plan.default(name, target, f"verl: {plan.value(name)}")
    plan.say(
        "trainer.n_gpus_per_node",
        "converted",
        "accelerate.num_processes",
        f"{plan.value('trainer.nnodes')} × {plan.value('trainer.n_gpus_per_node')} = {w}",
    )
    plan.facts += [
        ("processes", w, "machines × GPUs per machine"),
        ("completions per rollout", b * n, f"{b} prompts × {n}"),
        ("completions per optimizer step", m * n, f"{m} prompts × {n}"),
        ("per_device_train_batch_size", d, "completions per forward and process"),
        ("gradient_accumulation_steps", batch.accumulation, f"{m * n} / ({d} × {w})"),
        ("steps_per_generation", batch.steps_per_generation, f"{b * n} / ({d} × {w})"),
        ("optimizer steps per rollout", batch.optimizer_steps, f"{batch.passes} × {b} / {m}"),
    ]
    if n < 2 and plan.text("algorithm.adv_estimator") != "gae":
        plan.traps.append("rollout.n=1: a group of one has no baseline, every advantage is zero")


def _sequence_parallel(plan: Plan, shards: int, micro: int | None) -> None:
    length = plan.integer("data.max_prompt_length") + plan.integer("data.max_response_length")
    for prefix in (_ACTOR, _ACTOR + "fsdp_config."):
        name = prefix + "ulysses_sequence_parallel_size"
        if not plan.is_set(name):
            continue
        if plan.integer(name, low=1) == 1:
            plan.say(name, "no effect", "", "1: off")
            continue
        cost = (
            f"one sequence of {length} tokens must fit on one GPU: {length} tokens instead of "
            f"{length // shards}"
        )
        if micro and micro < shards:
            cost += f"; micro-batch {micro} is below {shards}, so a forward holds up to "
            cost += f"{shards / micro:g}× verl's tokens per GPU"
        plan.say(
            name,
            "approximate",
            "trainer.per_device_train_batch_size",
            f"TRL rejects sequence parallelism: folded into the per-device batch, / {shards}; "
            + cost,
        )
