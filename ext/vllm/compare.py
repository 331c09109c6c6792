"""Whether a server is one for the model that is trained: asked before training starts."""

import time
from collections.abc import Mapping
from typing import Any

import requests
from transformers import PretrainedConfig

from polopt import __version__
from polopt.ext.vllm.auth import ABOUT, KEY

__all__ = ["unfit"]

_SHAPES = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
)
"""What decides names and shapes of weights, beside the vocabulary."""


def unfit(url: str, key: str, model: PretrainedConfig, *, seconds: float, gpu: bool) -> str | None:
    """Return in one sentence why a server cannot generate for a trainer, or None if it can.

    A server that polopt did not start says less of itself: then only what weights need is looked
    at.

    Args:
        url: Where it answers.
        key: See `polopt.ext.vllm.auth`.
        model: Of the trained model.
        seconds: The longest wait until it answers.
        gpu: Whether the trainer is on one, which vLLM's own weight transfer needs.
    """
    with requests.Session() as session:
        session.trust_env = False  # a proxy would see the key, .netrc would replace it
        if (fault := _wait(session, url, seconds)) is not None:
            return fault
        session.headers["Authorization"] = f"Bearer {key}"
        try:
            about = session.get(f"{url}{ABOUT}", timeout=30)
            if about.status_code == 401:
                return f"the vLLM server at {url} has another key: set {KEY} to the server's"
            if about.status_code == 200 and (fault := _compare(url, about.json(), model)):
                return fault
            info = session.get(f"{url}/server_info", params={"config_format": "json"}, timeout=120)
            if info.status_code != 200:
                return (
                    f"the server at {url} does not offer what sends weights to vLLM: start it with "
                    "polopt serve RECIPE"
                )
            transfer = info.json()["vllm_config"]["weight_transfer_config"]
        except (requests.RequestException, ValueError, TypeError, KeyError) as error:
            return f"what answers at {url} is no vLLM server that can be used: {error!r:.200}"
    if transfer is None:
        return f"the vLLM server at {url} takes no weights: start it with polopt serve RECIPE"
    if transfer["backend"] == "nccl" and not gpu:
        return (
            f"the vLLM server at {url} takes weights by nccl, and the trainer has no GPU: start it "
            "with vllm.backend=gloo"
        )
    return None


def _wait(session: requests.Session, url: str, seconds: float) -> str | None:
    end = time.monotonic() + seconds
    while True:
        try:
            if session.get(f"{url}/health", timeout=5).status_code == 200:
                return None
            why = "it is not healthy"
        except requests.RequestException as error:
            why = type(error).__name__
        if time.monotonic() > end:
            return (
                f"no vLLM server answers at {url} within {seconds:g} s ({why}): start it with "
                "polopt serve RECIPE, or mend trainer.vllm_server_base_url"
            )
        time.sleep(min(1.0, seconds))


def _compare(url: str, about: Mapping[str, Any], model: PretrainedConfig) -> str | None:
    import vllm

    here = {"vllm": vllm.__version__, "polopt": __version__}
    for name, ours in here.items():
        # What follows "+" is the device that vLLM was built for.
        theirs = str(about[name])
        if theirs.partition("+")[0] != ours.partition("+")[0]:
            return (
                f"the server at {url} runs {name} {theirs}, this trainer has {ours}: install the "
                "same on both"
            )
    ours, theirs = model.to_dict(), about["model"]
    # A model of texts and images has those of its texts in a section.
    ours, theirs = (x.get("text_config") or x for x in (ours, theirs))
    mend = "serve the model that is trained, with polopt serve RECIPE"
    if theirs.get("vocab_size") != ours.get("vocab_size"):
        return (
            f"the model that {url} serves has a vocabulary of {theirs.get('vocab_size')}, the "
            f"trained one of {ours.get('vocab_size')}: {mend}"
        )
    for name in _SHAPES:
        pair = theirs.get(name), ours.get(name)
        if None not in pair and pair[0] != pair[1]:  # releases of transformers name more or fewer
            return (
                f"{url} serves another model: its {name} is {pair[0]}, that of the "
                f"trained one {pair[1]}: {mend}"
            )
    return None
