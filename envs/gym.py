"""Any environment of gymnasium that has a vector of observations, in the protocol of ours."""

import difflib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polopt.envs.batched import VectorEnv
from polopt.envs.finite import EnvError

try:
    import gymnasium
    from gymnasium.spaces import Box, Discrete
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "gymnasium is not installed: pip install 'polopt[torchrl]'", name=error.name
    ) from error

__all__ = ["GymnasiumEnv", "check_id"]


def check_id(name: str, arguments: Mapping[str, Any]) -> tuple[int | None, float | None]:
    """Check that an environment can be made, and that its spaces fit.

    Args:
        name: Id, for example `LunarLander-v3`.
        arguments: Keyword arguments of `gymnasium.make`.

    Returns:
        Its time limit and the return from which gymnasium counts it as solved, if it has them.

    Raises:
        ValueError: If the id is unknown (with the nearest one), an argument is wrong, or the
            spaces are not a vector of observations and discrete or a vector of actions.
        ImportError: If its simulator is not installed.
    """
    env = _make(name, arguments)
    try:
        seen, action = env.observation_space, env.action_space
        if not (isinstance(seen, Box) and len(seen.shape) == 1 and seen.shape[0]):
            raise ValueError(
                f"{name} observes {seen}, policies here need a Box of one dimension, not empty"
            )
        if not (isinstance(action, Discrete) or (isinstance(action, Box) and action.shape)):
            raise ValueError(f"{name} takes {action}, actors here do Discrete and Box")
        if isinstance(action, Box) and len(action.shape) != 1:
            raise ValueError(f"{name} takes {action}, actors here do a Box of one dimension")
        if isinstance(action, Box) and not np.issubdtype(action.dtype, np.floating):
            raise ValueError(
                f"{name} takes whole numbers, {action}, actors here give any number of a range: "
                "make its action_space a Discrete, or a Box of floats"
            )
    finally:
        env.close()
    spec = env.spec
    return (None, None) if spec is None else (spec.max_episode_steps, spec.reward_threshold)


class GymnasiumEnv(VectorEnv):
    """N copies of an environment of gymnasium, each stepped alone.

    There is no vector environment of gymnasium inside, so nothing resets by itself. A row that
    is stepped after its end keeps its last observation and earns nothing. Each episode is
    seeded from one generator, so a seed fixes a run.

    Simulators cannot be saved in general: `restore` continues the seeds and begins new
    episodes.

    Args:
        name: Id of the environment.
        num_envs: N.
        seed: Of all episodes; None draws one from torch's global generator.
        arguments: Keyword arguments of `gymnasium.make`.

    Raises:
        ValueError: As `check_id`.
        EnvError: In use, if an observation has another shape than the environment declares, or
            a reward or a flag is no number.
        ImportError: If its simulator is not installed.
    """

    exact = False

    def __init__(
        self,
        name: str,
        num_envs: int,
        *,
        seed: int | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        check_id(name, arguments or {})
        super().__init__(num_envs)
        self._name = name
        self._envs = [_make(name, arguments or {}) for _ in range(num_envs)]
        seen, action = self._envs[0].observation_space, self._envs[0].action_space
        self._first = int(action.start) if isinstance(action, Discrete) else 0
        actions: int | tuple[Tensor, Tensor]
        if isinstance(action, Discrete):
            actions = int(action.n)
        else:
            actions = _floats(action.low), _floats(action.high)  # type: ignore[attr-defined]
            self._bounds = actions
        self._make_specs(_floats(seen.low), _floats(seen.high), actions)  # type: ignore[attr-defined]
        width = seen.shape[0]  # type: ignore[index]
        self._observation = torch.zeros(num_envs, width)
        self._flags = torch.zeros(2, num_envs, dtype=torch.bool)
        self.set_seed(int(torch.randint(2**31, ())) if seed is None else seed)

    def restart(self, mask: Tensor | None = None) -> Tensor:
        """See `VectorEnv`."""
        n = self.batch_size[0]
        rows = range(n) if mask is None else mask.nonzero().flatten().tolist()
        seeds = torch.randint(2**31, (n,), generator=self._generator).tolist()
        self._observation, self._flags = self._observation.clone(), self._flags.clone()
        for row in rows:
            observation, _ = self._envs[row].reset(seed=seeds[row])
            self._check_shape(row, observation)
            self._observation[row] = _floats(observation)
            self._flags[:, row] = False
        return self._observation

    def advance(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `VectorEnv`; continuous actions are clipped to their bounds."""
        if action.is_floating_point():
            choices = list(action.clamp(*self._bounds).numpy())
        else:
            choices = (action + self._first).tolist()
        over = self._flags.any(0).tolist()
        # Rows of arrays: to write a row of a tensor costs more than many simulators need.
        seen, flags = self._observation.numpy().copy(), self._flags.numpy().copy()
        paid = np.zeros(len(choices), np.float32)
        for row, choice in enumerate(choices):
            if not over[row]:
                reached, reward, terminated, truncated, _ = self._envs[row].step(choice)
                self._check_shape(row, reached)  # numpy would stretch a shorter one
                try:
                    paid[row], flags[0, row], flags[1, row] = reward, terminated, truncated
                except (TypeError, ValueError):
                    raise EnvError(
                        f"environment {row} of {self._name} gave the reward {reward!r} and the "
                        f"flags {terminated!r} and {truncated!r}, each must be one number: mend "
                        "its step"
                    ) from None
                seen[row] = reached
        observation, reward, flags = map(torch.from_numpy, (seen, paid, flags))
        self._observation, self._flags = observation, flags
        return observation, reward, flags[0], flags[1]

    def snapshot(self) -> dict[str, Tensor]:
        """The generator of seeds."""
        return {"generator": self._generator.get_state()}

    def restore(self, snapshot: Mapping[str, Tensor]) -> Tensor:
        """Continue the seeds, with new episodes; see `VectorEnv`."""
        self._generator.set_state(snapshot["generator"])
        observation = self.restart()
        self._restored = True
        return observation

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close every copy."""
        for env in self._envs:
            env.close()
        super().close(raise_if_closed=raise_if_closed)

    def _observe(self) -> Tensor:
        return self._observation

    def _check_shape(self, row: int, observation: Any) -> None:  # noqa: ANN401
        shape, declared = np.shape(observation), tuple(self._observation.shape[1:])
        if shape != declared:
            raise EnvError(
                f"environment {row} of {self._name} gave an observation of shape {list(shape)}, "
                f"its observation_space declares {list(declared)}: mend one of them"
            )


def _floats(array: Any) -> Tensor:  # noqa: ANN401
    return torch.as_tensor(array, dtype=torch.float32)


def _make(name: str, arguments: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    try:
        return gymnasium.make(name, disable_env_checker=True, **arguments)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ModuleNotFoundError(
            f"the simulator of {name} is not installed: pip install 'polopt[control]'"
        ) from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        if name in gymnasium.registry:
            raise ValueError(f"gymnasium cannot make {name!r}: {error}") from error
        near = difflib.get_close_matches(name, gymnasium.registry, 1, 0.0)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"gymnasium has no environment {name!r}{hint}") from error
    except Exception as error:  # whatever a simulator does with arguments it cannot take
        raise ValueError(
            f"gymnasium cannot make {name!r} with {dict(arguments)}: {error}"
        ) from error
