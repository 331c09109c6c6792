"""A plan as text, Markdown for issues and chats, and as JSON."""

from dataclasses import replace
from typing import Any

from polopt.launch.plan.arithmetic import arithmetic, notes
from polopt.launch.plan.gpus import GIB
from polopt.launch.plan.knobs import (
    GUIDE,
    KNOBS,
    Effect,
    effect,
    effects,
    faster,
    way_out,
)
from polopt.launch.plan.parallel import Choice, choose
from polopt.launch.plan.phases import ASSUMED, HEADROOM, Builder, Phase, Plan
from polopt.launch.plan.states import LIVE_PARAMETERS

__all__ = ["as_json", "as_markdown"]

CHECKED = (
    "weights, gradients, optimizer, gathered weights, activations (with and without "
    "checkpointing) and the fused head of the update and log-prob phases, against torch's memory "
    "tracker (`python -m polopt.launch.plan.validate`)"
)
UNCHECKED = (
    "the full head (logits), sequence parallel, ZeRO, DDP's buckets, vLLM's inside, the sync and "
    "everything that the allocator adds; no peak of a real GPU run was compared"
)


def _settings(planned: Plan) -> dict[str, Any]:
    s = planned.setup
    skip = ("model", "gpu")
    return {k: getattr(s, k) for k in s.__dataclass_fields__ if k not in skip}


def _assumed(planned: Plan) -> dict[str, float]:
    s = planned.setup
    found = {
        **{f"{name}, GiB": value for name, value in ASSUMED.items()},
        f"usable memory of {s.gpu.name}, GiB": s.gpu.memory,
        "card / peak below which an allocating phase is at risk": HEADROOM,
    }
    if planned.engine is not None:
        what = "activations of vLLM (0.5 + 1.5 × tokens / 32768 × hidden / 5120), GiB"
        found[what] = planned.engine.work
    if s.head == "full":
        found["bytes per logit of a pass without gradient"] = 9.0
    if s.sharding == "zero3":
        found["weights that ZeRO-3 keeps gathered"] = float(LIVE_PARAMETERS)
    return found


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "name": phase.name,
        "verdict": phase.verdict,
        "total_gib": phase.total,
        "margin_gib": phase.margin,
        "parts_gib": dict(phase.biggest),
        "problem": phase.problem,
    }


def _activations(planned: Plan) -> dict[str, float]:
    """GiB that all layers keep in an update, with and without checkpointing."""
    sizes = {}
    for name, on in (("with_checkpointing", True), ("without_checkpointing", False)):
        work = Builder(replace(planned.setup, checkpointing=on)).work()
        sizes[name] = work.kept / GIB
        if on:
            sizes["one_layer_recomputed"] = work.recomputed / GIB
    return sizes


def _effect(item: Effect) -> dict[str, Any]:
    return {
        "knob": item.knob.name,
        "helps": item.helps,
        "settings": item.settings,
        "phase_gib": item.after,
        "saved_gib": item.before - item.after,
        "verdict": item.plan.verdict if item.plan else None,
        "trl": item.knob.trl,
        "verl": item.knob.verl,
        "price": item.knob.price,
    }


def as_json(planned: Plan, said: list[str]) -> dict[str, Any]:
    """Return the whole plan as JSON-able data.

    Args:
        planned: The plan.
        said: What was assumed while reading the input.
    """
    s, worst = planned.setup, planned.worst
    choice = choose(s)
    content: dict[str, Any] = {
        "verdict": planned.verdict,
        "worst_phase": worst.name,
        "margin_gib": worst.margin,
        "model": {
            "name": s.model.name,
            "type": s.model.model_type,
            "parameters": s.model.parameters,
            "activations_checked": s.model.checked,
        },
        "gpu": {"name": s.gpu.name, "memory_gib": s.gpu.memory},
        "settings": _settings(planned),
        "phases": [_phase(p) for p in planned.phases],
        "kept_activations_gib": _activations(planned),
        "vllm": None if planned.engine is None else vars(planned.engine),
        "host_gib": planned.host,
        "batch": arithmetic(planned),
        "notes": [*said, *notes(planned)],
        "knobs": [_effect(e) for e in effects(planned)],
        "guide": {
            section: [_effect(effect(KNOBS[n], planned, worst)) for n in names]
            for section, names in GUIDE.items()
        },
        "way_out": [_effect(e) for e in way_out(planned)],
        "faster": [
            {"settings": text, "verdict": p.verdict, "margin_gib": p.worst.margin}
            for text, p in (faster(planned) if planned.verdict != "does not fit" else [])
        ],
        "parallelism": vars(choice),
        "checked": CHECKED,
        "not_checked": UNCHECKED,
        "assumed": _assumed(planned),
    }
    return content


def as_markdown(planned: Plan, said: list[str]) -> str:
    """Return the whole plan as Markdown.

    Args:
        planned: The plan.
        said: What was assumed while reading the input.
    """
    s, worst = planned.setup, planned.worst
    model = s.model
    lines = [
        f"## {model.name} on {s.gpus} × {s.gpu.name}: {planned.verdict}",
        "",
        _headline(planned),
        "",
        f"{model.parameters:,} parameters ({model.model_type}), {s.gpu.memory:.1f} GiB per card, "
        f"engine {s.engine}, sharding {s.sharding} over {s.degree}, precision {s.dtype}, "
        f"{s.prompt_length} + {s.completion_length} tokens, micro-batch {s.micro_batch}, "
        f"checkpointing {'on' if s.checkpointing else 'off'}, attention {s.attention}, "
        f"head {s.head}.",
        "",
        "| phase | GiB | margin | verdict | biggest parts |",
        "|---|---|---|---|---|",
    ]
    for phase in planned.phases:
        parts = ", ".join(f"{name} {size:.1f}" for name, size in phase.biggest[:4])
        lines.append(
            f"| {phase.name} | {phase.total:.1f} | {phase.margin:.1f} | {phase.verdict} | {parts} |"
        )
    kept = _activations(planned)
    lines += [
        "",
        f"Activations kept for one backward pass: {kept['without_checkpointing']:.1f} GiB without "
        f"checkpointing, {kept['with_checkpointing']:.1f} with it, and "
        f"{kept['one_layer_recomputed']:.1f} for the layer that is recomputed.",
    ]
    if planned.engine is not None:
        e = planned.engine
        lines += [
            "",
            f"vLLM: {e.share:.1f} GiB per card = weights {e.weights:.1f} + activations "
            f"{e.work:.1f} + CUDA graphs {e.graphs:.1f} + cache {max(0.0, e.cache):.1f}; "
            f"{e.token / 1024:.0f} KiB per token; the cache of a replica holds {e.sequences} "
            f"sequences of {s.length} tokens; {e.replicas} replicas.",
        ]
    if planned.host:
        lines += [
            "",
            f"Host memory for offload: at least {planned.host:.0f} GiB over all machines.",
        ]
    lines += ["", "### Memory: what to turn", "", *_knobs(planned, worst)]
    lines += ["", "### Parallelism", "", *_parallelism(choose(s))]
    lines += ["", "### Batches", "", "| quantity | value |", "|---|---|"]
    lines += [f"| {k.replace('_', ' ')} | {v:,.10g} |" for k, v in arithmetic(planned).items()]
    remarks = [*said, *notes(planned)]
    if remarks:
        lines += ["", "### Notes", "", *(f"- {text}" for text in remarks)]
    lines += ["", "### How far to trust this", "", f"- Checked: {CHECKED}."]
    if not model.checked:
        lines.append(
            f"- The activations of model_type {model.model_type!r} were not checked: it is read "
            "like a Llama, which can be off by a tenth and more."
        )
    lines.append(f"- Not checked: {UNCHECKED}.")
    assumed = "; ".join(f"{k}: {v:g}" for k, v in _assumed(planned).items())
    lines.append(f"- Assumed: {assumed}.")
    return "\n".join(lines)


def _headline(planned: Plan) -> str:
    worst, card = planned.worst, planned.setup.gpu.memory
    if worst.problem:
        return f"Tightest: {worst.name}. {worst.problem[:1].upper() + worst.problem[1:]}."
    text = f"Tightest: {worst.name}, {worst.total:.1f} of {card:.1f} GiB"
    if worst.verdict == "risk":
        return (
            f"{text}. Card / peak is {card / worst.total:.2f}, below {HEADROOM}: fragmentation may "
            "decide."
        )
    return f"{text}, margin {worst.margin:.1f}."


def _knobs(planned: Plan, worst: Phase) -> list[str]:
    found = effects(planned)
    helping = [e for e in found if e.helps]
    lines = []
    if planned.verdict == "does not fit":
        chain = way_out(planned)
        if chain and chain[-1].plan and chain[-1].plan.verdict != "does not fit":
            steps = " → ".join(f"`{_words(e)}`" for e in chain)
            result = chain[-1].plan
            lines += [f"Next: `{_words(chain[0])}`. Until it fits: {steps} ({result.verdict}, "
                      f"{result.worst.name} {result.worst.total:.1f} GiB).", ""]  # fmt: skip
        else:
            lines += ["No chain of these knobs makes it fit: more cards, or a smaller model.", ""]
    lines += [
        f"| knob for {worst.name} | change | saves, GiB | then | price |",
        "|---|---|---|---|---|",
    ]
    for e in helping:
        name = e.knob.verl if planned.setup.engine == "verl" else e.knob.trl
        then = e.plan.verdict if e.plan else ""
        lines.append(
            f"| {e.knob.name}: {name} | `{_words(e)}` | {e.before - e.after:.1f} | {then} "
            f"| {e.knob.price} |"
        )
    idle = ", ".join(e.knob.name for e in found if not e.helps)
    lines += ["", f"Cannot help {worst.name} here: {idle or 'none'}."]
    for section, names in GUIDE.items():
        marks = []
        for name in names:
            e = effect(KNOBS[name], planned, worst)
            mark = f"saves {e.before - e.after:.1f}" if e.helps else "cannot help"
            marks.append(f"{name} ({mark})")
        lines += ["", f"The guide's order, {section}: {' → '.join(marks)}."]
    if planned.verdict != "does not fit":
        steps = [f"`{text}`: {p.verdict}, {p.worst.name} {p.worst.total:.1f} GiB"
                 for text, p in faster(planned)]  # fmt: skip
        lines += ["", f"For speed (10.11, step 2), each alone: {'; '.join(steps)}."]
    return lines


def _words(item: Effect) -> str:
    return " ".join(f"{k}={str(v).lower()}" for k, v in item.settings.items())


def _parallelism(choice: Choice) -> list[str]:
    wanted = " ".join(f"{k}={v}" for k, v in choice.settings.items())
    lines = [f"Choice: `{wanted}` ({choice.verdict}).", ""]
    lines += [f"- {reason}" for reason in choice.reasons]
    lines.append(f"- The guide's rule (10.3): {choice.guide}.")
    lines += [
        "",
        "| cards per copy | states | update | generation | verdict |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['shards']} | {r['states']:.1f} | {r['update']:.1f} | {r['generation']:.1f} "
        f"| {r['verdict']} |"
        for r in choice.sharding
    ]
    rows = [r for r in choice.tensor if r["replicas"]]
    if rows:
        lines += [
            "",
            "| tensor parallel | vLLM weights | sequences in cache | replicas | share > weights |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['tensor_parallel']} | {r['weights']:.1f} | {r['sequences']} | {r['replicas']} "
            f"| {'yes' if r['verl_rule'] else 'no'} |"
            for r in rows
        ]
    return lines
