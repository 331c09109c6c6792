"""Steps, tokens and completions of a run."""

from polopt.launch.plan.phases import Plan
from polopt.launch.plan.states import accumulation

__all__ = ["arithmetic", "notes"]


def arithmetic(planned: Plan) -> dict[str, float | int]:
    """Return the numbers of batches, steps and tokens; tokens are those of full-length sequences.

    Args:
        planned: A plan.
    """
    s, engine = planned.setup, planned.engine
    rollout = s.prompts_per_rollout * s.num_generations
    step = s.completions_per_step or rollout
    per_rollout = -(-rollout // step) * s.iterations
    batch = s.log_prob_batch or s.micro_batch
    numbers: dict[str, float | int] = {
        "data_parallel_ranks": s.data_parallel,
        "completions_per_rollout": rollout,
        "completions_per_optimizer_step": step,
        "optimizer_steps_per_rollout": per_rollout,
        "micro_batches_per_optimizer_step": accumulation(s),
        "tokens_per_micro_batch_per_gpu": s.micro_batch * s.length / s.sequence_parallel,
        "tokens_per_optimizer_step": step * s.length,
        "tokens_per_rollout": rollout * s.length,
        "log_prob_passes_per_rollout": -(-rollout // (batch * s.data_parallel)),
    }
    if engine is not None:
        numbers |= {
            "vllm_replicas": engine.replicas,
            "sequences_per_replica": engine.waiting,
            "sequences_in_flight_per_replica": min(engine.running, engine.waiting),
        }
        if engine.running:
            numbers["waves_per_rollout"] = -(-engine.waiting // engine.running)
    if s.rows:
        rollouts = s.rows // s.prompts_per_rollout
        numbers |= {
            "rollouts_per_epoch": rollouts,
            "rows_left_over_per_epoch": s.rows - rollouts * s.prompts_per_rollout,
            "completions_per_epoch": rollouts * rollout,
            "tokens_per_epoch": rollouts * rollout * s.length,
            "optimizer_steps_per_epoch": rollouts * per_rollout,
            "rollouts": int(rollouts * s.epochs),
            "optimizer_steps": int(rollouts * s.epochs) * per_rollout,
        }
    return numbers


def notes(planned: Plan) -> list[str]:
    """Return batch sizes that do not go up, one sentence each."""
    s, found = planned.setup, []
    rollout = s.prompts_per_rollout * s.num_generations
    step = s.completions_per_step or rollout
    per_pass = s.micro_batch * s.data_parallel
    if step > rollout:
        found.append(f"completions_per_step={step} is more than the rollout's {rollout}")
    elif rollout % step:
        found.append(f"the rollout's {rollout} completions are no multiple of {step} per step")
    if step % per_pass:
        found.append(
            f"{step} completions per step are no multiple of micro_batch × ranks = "
            f"{s.micro_batch} × {s.data_parallel} = {per_pass}"
        )
    if s.rows and s.rows < s.prompts_per_rollout:
        found.append(f"{s.rows} rows do not fill one rollout of {s.prompts_per_rollout} prompts")
    return found
