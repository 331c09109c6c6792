"""What is measured on a GPU, as functions of a device: on a CPU they run at small sizes."""

import gc
import itertools
import statistics
import time

import torch

from polopt.losses import dapo, policy_loss


def cost(function, device, repeats=10):
    """Median milliseconds of a call, and the most MiB that it takes beside what is there.

    On a CPU memory is not measured: None.
    """
    on_gpu = device.type == "cuda"
    for _ in range(3):
        function()
    if not on_gpu:
        times = []
        for _ in range(repeats):
            began = time.process_time()
            function()
            times.append(1e3 * (time.process_time() - began))
        return statistics.median(times), None
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for mark in marks[:-1]:
        mark.record()
        function()
    marks[-1].record()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return statistics.median(times), peak


def llm_batch(rows, steps, dtype, device):
    """Log-probs, old ones, advantages, a mask and entropies of answers of unequal lengths."""
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(rows, steps, generator=g)
    new = old + 0.1 * torch.randn(rows, steps, generator=g)
    length = torch.randint(1, steps + 1, (rows, 1), generator=g)
    entropy = torch.rand(rows, steps, generator=g)
    advantage = torch.randn(rows, 1, generator=g)
    mask = (torch.arange(steps) < length).to(device)
    floats = [x.to(device, dtype) for x in (new, old, advantage, entropy)]
    return floats[0].requires_grad_(), floats[1], floats[2], mask, floats[3]


def gradient(loss, batch, objective):
    """The loss, summed over its terms, and its gradient with respect to the log-probs."""
    new, old, advantage, mask, entropy = batch
    out = loss(new, old, advantage, mask, objective=objective, entropy=entropy)
    total = torch.stack([v for k, v in out.items() if k.startswith("loss_")]).sum()
    return total, torch.autograd.grad(total, new)[0]


def qwen3(device, *, hidden, layers, vocabulary, dtype=torch.float32):
    """A random Qwen3 with a tied head, made in place, and its config."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 128, 1), head_dim=64, max_position_embeddings=4096,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    with device:
        return Qwen3ForCausalLM(config).to(dtype)


class Training:
    """DAPO on one batch of random answers, in plain torch: model, loss, backward, AdamW.

    Args:
        model: A causal language model.
        rows: Answers.
        prompt: Tokens of each prompt.
        answer: Tokens of each answer.
        autocast: Compute in bfloat16.
        lr: Learning rate.
    """

    def __init__(self, model, *, rows, prompt, answer, autocast, lr=1e-4):
        self.model, self.answer, self.autocast = model, answer, autocast
        self.device = next(model.parameters()).device
        g = torch.Generator().manual_seed(1)
        size = model.config.vocab_size
        self.ids = torch.randint(3, size, (rows, prompt + answer), generator=g).to(self.device)
        self.advantage = torch.tensor([[1.0], [-1.0]]).repeat(rows // 2, 1).to(self.device)
        self.mask = torch.ones(rows, answer, dtype=torch.bool, device=self.device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.objective = dapo().objective
        with torch.no_grad():
            self.old = self.log_probs()

    def log_probs(self):
        """Log-probabilities of the answers, float32 [rows, answer]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(input_ids=self.ids, logits_to_keep=self.answer + 1).logits[:, :-1]
        taken = self.ids[:, -self.answer :, None]
        return logits.float().log_softmax(-1).gather(-1, taken)[..., 0]

    def step(self):
        """One optimizer step."""
        out = policy_loss(
            self.log_probs(), self.old, self.advantage, self.mask, objective=self.objective
        )
        out["loss_objective"].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def gain(self):
        """Mean change of the answers' log-probs since the start, in favour of the good ones."""
        return float((self.advantage * (self.log_probs() - self.old)).mean())
