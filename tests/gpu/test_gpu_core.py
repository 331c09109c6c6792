"""The losses, and a training step with transformers: correct, how long, how much memory."""

import measures
import pytest
import torch

from polopt.losses import cispo, dapo, grpo, gspo, policy_loss

OBJECTIVES = {
    "dapo": dapo().objective,
    "grpo": grpo(kl_coef=0.0).objective,
    "gspo": gspo().objective,
    "cispo": cispo().objective,
}
ULPS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Relative error of a gradient; in bfloat16 that of rounding the gradient itself."""


@pytest.fixture
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_losses(device, dtype, mode, record, fresh):
    small = device.type == "cpu"
    if small and mode == "compiled":
        pytest.skip("compiled on a CPU by tests/losses/test_compile.py")
    loss = torch.compile(policy_loss, fullgraph=True) if mode == "compiled" else policy_loss
    size = (8, 64) if small else (64, 4096)
    batch = measures.llm_batch(*size, dtype, device)
    exact = [x.detach().cpu() for x in batch]
    exact = [x if x.dtype == torch.bool else x.double() for x in exact]
    exact[0].requires_grad_()
    for name, objective in OBJECTIVES.items():
        total, grad = measures.gradient(loss, batch, objective)
        wanted_total, wanted = measures.gradient(policy_loss, exact, objective)
        assert grad.dtype == dtype
        assert float((grad.cpu().double() - wanted).norm() / wanted.norm()) < ULPS[dtype], name
        assert total.item() == pytest.approx(wanted_total.item(), rel=1e-4, abs=1e-5), name
        ms, peak = measures.cost(
            lambda o=objective: measures.gradient(loss, batch, o), device, 2 if small else 20
        )
        batch_mib = sum(x.nbytes for x in batch) / 2**20
        record(
            f"loss {name}, {size[0]}x{size[1]}, {str(dtype)[6:]}, {mode}, {device.type}",
            ms=round(ms, 3),
            **({} if peak is None else {"peak_mib": round(peak, 1)}),
            batch_mib=round(batch_mib, 1),
        )


@pytest.mark.parametrize("kind", ["float32", "autocast", "bfloat16"])
def test_a_training_step_with_transformers(device, kind, record):
    pytest.importorskip("transformers")
    small = device.type == "cpu"
    shape = {"hidden": 64, "layers": 2, "vocabulary": 199}
    sizes = {"rows": 4, "prompt": 8, "answer": 16}
    if not small:
        shape = {"hidden": 1024, "layers": 28, "vocabulary": 151_936}
        sizes = {"rows": 8, "prompt": 256, "answer": 768}
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = measures.qwen3(device, **shape, dtype=dtype)
    if not small:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    training = measures.Training(model, **sizes, autocast=kind == "autocast")
    ms, peak = measures.cost(training.step, device, 3)
    assert training.gain() > 0  # good answers became likelier than bad ones
    parameters = sum(p.numel() for p in model.parameters())
    tokens = sizes["rows"] * (sizes["prompt"] + sizes["answer"])
    record(
        f"training step, {parameters / 1e6:.0f}M parameters, {kind}, {device.type}",
        ms=round(ms, 1),
        tokens_per_second=round(1e3 * tokens / ms),
        **({} if peak is None else {"peak_beside_model_mib": round(peak)}),
    )
