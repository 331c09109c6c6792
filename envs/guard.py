"""Refuses environments whose transitions are wrong without saying so."""

try:
    from torchrl.envs import EnvBase, GymWrapper, TransformedEnv
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "control environments need TorchRL: pip install 'polopt[torchrl]'", name=error.name
    ) from error

__all__ = ["check_transitions"]


def check_transitions(env: EnvBase) -> None:
    """Refuse a vector environment of gymnasium that resets by itself in the next step.

    In that mode (gymnasium's default) the step after an episode's end is a reset: TorchRL
    records its observation as the end of one episode and its zero reward as a transition of
    the next. `GymEnv(name, num_envs=N)` builds such environments. Other environments pass.

    Raises:
        ValueError: If `env` is one of them.
    """
    if isinstance(env, TransformedEnv):
        check_transitions(env.base_env)
    elif isinstance(env, GymWrapper) and env.batch_size:
        # The wrapper forwards attributes; an environment may declare its mode in either place.
        # A single one never does: gymnasium 1.1 writes into metadata that its copies share.
        declared = (getattr(env, "autoreset_mode", None), env.metadata.get("autoreset_mode"))
        if any("NEXT_STEP" in str(mode).upper() for mode in declared):
            raise ValueError(
                "this vector environment resets by itself in the step after an episode's end "
                "(autoreset mode NEXT_STEP, the default of gymnasium and of "
                "GymEnv(num_envs=...)), so final observations are lost and every episode gets a "
                "false transition: use a task of polopt, or GymWrapper(SyncVectorEnv([...], "
                "autoreset_mode=AutoresetMode.DISABLED))"
            )
