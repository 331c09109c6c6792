"""Why a peer's number is another one, and who follows the paper."""

# name: (what the peer does, verdict)
EXPLAINED: dict[str, tuple[str, str]] = {
    "clamp cuts the gradient": (
        "The log-ratio is clamped to ±20 and the clamp stops the gradient beyond.",
        "Same value. No paper clamps; a step that far away with A < 0 has to be pulled back, so "
        "here the bounded ratio keeps its gradient.",
    ),
    "no bound on the ratio": (
        "exp of the free log-ratio: 1e20 and more, infinite or NaN in float32.",
        "The peer is the formula to the letter. Beyond ±20 nats the number has no use and breaks "
        "a run; here the ratio is bounded and its gradient is not zero.",
    ),
    "NaN without steps": (
        "A batch without a trained step gives NaN (0 / 0).",
        "Zero loss and zero gradient: nothing was sampled, nothing is learnt.",
    ),
    "NaN gradient without steps": (
        "Its gradient is NaN as well.",
        "As above.",
    ),
    "counts empty rows": (
        "The mean over sequences counts those without a trained step.",
        "Papers do not treat empty rows. Leaving them out keeps the scale independent of how many "
        "answers were filtered; the peer's number is ours times non-empty / all.",
    ),
    "empty row adds its advantage": (
        "An empty row adds −A·exp(0) to the value (its gradient is zero).",
        "A row without steps contributes nothing.",
    ),
    "tie at the dual bound": (
        "Where the ratio equals the dual bound exactly, min splits the gradient in halves.",
        "Either is a subgradient; here the bound is strict.",
    ),
    "ratio rounded to bfloat16": (
        "Ratios of bfloat16 log-probabilities are rounded to bfloat16: steps of 0.4 % at one, so "
        "a clip at 3e-4 is hit by rounding alone.",
        "Here arithmetic is in float32 whatever the inputs are.",
    ),
    "sequence ratio differentiated": (
        "With advantages that vary within a sequence, every token gets the mean of their terms.",
        "GSPO-token (https://arxiv.org/abs/2507.18071 eq. 13-14) gives each token its own "
        "advantage, as here and in verl. Equal advantages make both the same.",
    ),
    "divides by dropped steps": (
        "Steps below the entropy quantile lose their loss but stay in the denominator (and in the "
        "divergence).",
        "https://arxiv.org/abs/2506.01939 eq. 6 divides by the selected steps, as here.",
    ),
    "entropy over all steps": (
        "The entropy bonus is a mean over all steps whatever the aggregation of the loss.",
        "A choice; here all terms share one aggregation and one denominator.",
    ),
    "local denominators": (
        "Each micro-batch is divided by its own count, then the results are averaged.",
        "Not the gradient of the whole batch unless all counts are equal. Here the loop hands in "
        "the count of the whole.",
    ),
    "no log-probability": (
        "TorchRL's CISPO returns −clip(r)·A: no log-probability, no stop-gradient, so clipped "
        "steps get no gradient.",
        "https://arxiv.org/abs/2506.13585 eq. 4-5 is −sg(clip(r))·A·log π, as here, in verl and "
        "in TRL: clipped steps keep their gradient, which is the point of CISPO.",
    ),
    "divergence over padding too": (
        "The divergence is averaged over all positions, padding included.",
        "Here it shares the mask and the denominator of the policy term.",
    ),
    "no half in the squared error": (
        "The squared error has no factor ½.",
        "A convention; ½ here, in verl and in OpenRLHF. Set `coef` of `ValueTerm`.",
    ),
    "coefficient changed before the backward pass": (
        "`KLPENPPOLoss` adapts its coefficient in place during forward, after the loss was "
        "computed: the gradient then belongs to another coefficient than the loss.",
        "https://arxiv.org/abs/1707.06347 adapts it after the policy update. Here a "
        "controller does, between updates.",
    ),
    "constants in float32": (
        "A constant (γ, γλ, a temperature) passes through float32 although inputs are float64.",
        "A rounding of 1e-8; none here.",
    ),
    "rewards in float32": (
        "Rewards pass through float32 although they are float64.",
        "A rounding of 1e-8; none here.",
    ),
    "divergence in float32": (
        "The divergence is computed in float32 although inputs are float64, k3 without expm1.",
        "A rounding; none here.",
    ),
    "single answer keeps its reward": (
        "The only answer of a group keeps its reward as advantage.",
        "Undefined by the papers: it has nothing to be compared with. Zero here.",
    ),
    "counts rewards that are not zero": (
        "GPG's α is samples / samples with a reward other than zero.",
        "https://arxiv.org/abs/2504.02546: groups / groups with signal, as here.",
    ),
    "λ below zero": (
        "VAPO's λ = 1 − 1 / (α·length) taken as it is: negative for short answers.",
        "https://arxiv.org/abs/2504.05118 eq. 5 does not say; λ is in [0, 1] by definition.",
    ),
    "deviation with n": (
        "Whitening divides by the deviation with n, floored, instead of n − 1.",
        "Papers are silent; the two differ by √(n / (n − 1)).",
    ),
    "centred over the batch": (
        "REINFORCE++-baseline without its deviation still subtracts the batch mean.",
        "A variant of the peer's; here `scale='none'` without `whiten` leaves it out.",
    ),
    "values of zero at untrained tokens": (
        "Observation tokens inside an answer have value zero, and λγ decays over them.",
        "This loses the bootstrap across a tool call. verl carries over them, as "
        "a caller does here by handing in the trained tokens only.",
    ),
    "floor under the deviation": (
        "1e-6 is a floor under the standard deviation, not added to it.",
        "A convention; differs in the sixth digit.",
    ),
    "adds to the deviation": (
        "1e-4 is added to the standard deviation of the batch.",
        "A convention; here `whiten` adds 1e-8 to the variance.",
    ),
    "no floor beyond the limit": (
        "The punishment keeps falling beyond the limit.",
        "https://arxiv.org/abs/2503.14476 eq. 13 is −1 there. Cannot happen when generation stops "
        "at the limit.",
    ),
    "result clamped to 10": (
        "The estimate is clamped to ±10 and the clamp stops the gradient: no penalty at all where "
        "the policy is farthest from the reference.",
        "No clamp in the definition (http://joschu.net/blog/kl-approx.html). Here only the "
        "argument of exp is bounded, and the gradient lives.",
    ),
    "NaN where exp overflows": (
        "The gradient of k3 is NaN where exp overflows in float32.",
        "Bounded here.",
    ),
    "NaN for an impossible token": (
        "logsumexp − Σ p·z is NaN, with its gradient, where a logit is −inf.",
        "Zero probability adds zero entropy, as torch's Categorical (and the module here) has it.",
    ),
    "entropy by cancellation": (
        "logsumexp − Σ p·z loses its digits where one token has nearly all probability.",
        "−Σ p·log p does not.",
    ),
    "arithmetic in bfloat16": (
        "Computed in bfloat16 throughout.",
        "Hand a distribution logits of float32.",
    ),
    "bounds on the inverse ratio": (
        "verl's k1 rejection tests −log r against the logarithms of the bounds: “0.5_5.0” keeps "
        "r in [0.2, 2].",
        "Its documentation intends r in [0.5, 5], as here. Equal for reciprocal bounds.",
    ),
    "weight of the sequence before rejection": (
        "The weight of a sequence includes tokens that rejection then drops.",
        "Both are in use. Here a mask is fixed before the loss, so the weight sees what is "
        "trained on; two corrections on the full mask give the peer's number.",
    ),
}

OUT_OF_SCOPE: dict[str, str] = {
    "dro is not offered": "Docs show how a user adds DRO as a loss of one's own.",
    "dppo is not offered": "DPPO is left out on purpose.",
    "luspo is not offered": "LUSPO is left out on purpose.",
    "vespo is not offered": "VESPO is left out on purpose.",
    "optimal token baseline is not offered": "Left out on purpose.",
    "mask by divergence is not offered": "TorchRL's own rule, from no paper that it names.",
    "rescaled ratios are not offered": "TorchRL's `max_importance_ratio`, a rule of its own.",
    "absolute error is not offered": "For values: squared and Huber errors are.",
    "weights divided by their mean are not offered": "verl's `batch_normalize`.",
    "the peer raised": "There is no number to compare with.",
}
