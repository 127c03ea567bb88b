"""What a device can promise when its operator promised nothing. Pure; owns the rule, not the targets."""

from msgspec.structs import replace

from headrace.core.config import CostProfile, EngineConfig, TierTargets

# The usual targets are an accelerator's. Where this many prompts of this many tokens take longer than the shortest
# of them, keeping to it would refuse a handful of people who ask at once.
_PROMPTS = 20
_TOKENS = 512
# Where half of the slots, with this many tokens each, and a short prompt beside them take longer for a step than the
# shortest time between tokens, keeping to that would have sequences take turns and cut every prompt into parts, each of
# which costs a step: everybody would wait longer.
_CONTEXT = 128
_SHORT_PROMPT = 64


def fit_targets(targets: dict[str, TierTargets], profile: CostProfile, slots: int) -> dict[str, TierTargets]:
    """Each kind of target stretched by what the device needs. Targets that somebody set stay as they are."""
    if targets != EngineConfig().targets:
        return targets
    prompts_s = _PROMPTS * (profile.c0_s + _TOKENS * profile.c_in_s)
    rows = max(1, slots // 2)
    step_s = profile.c0_s + rows * (profile.c_out_s + _CONTEXT * profile.c_kv_s) + _SHORT_PROMPT * profile.c_in_s
    later = max(1.0, prompts_s / min(target.ttft_s for target in targets.values()))
    slower = max(1.0, step_s / min(target.itl_s for target in targets.values()))
    return {
        tier: replace(target, ttft_s=target.ttft_s * later, itl_s=target.itl_s * slower)
        for tier, target in targets.items()
    }
