"""What a device can promise when its operator promised nothing. Pure; owns the rule, not the targets."""

from msgspec.structs import replace

from headrace.core.config import CostProfile, EngineConfig, TierTargets

# The usual targets are an accelerator's. Where this many prompts of this many tokens take longer than the shortest
# of them, keeping to it would refuse a handful of people who ask at once.
_PROMPTS = 20
_TOKENS = 512


def fit_targets(targets: dict[str, TierTargets], profile: CostProfile) -> dict[str, TierTargets]:
    """The times to first token, all stretched by what the device needs. Targets that somebody set stay as they are."""
    if targets != EngineConfig().targets:
        return targets
    shortest_s = min(target.ttft_s for target in targets.values())
    stretch = _PROMPTS * (profile.c0_s + _TOKENS * profile.c_in_s) / shortest_s
    if stretch <= 1.0:
        return targets
    return {tier: replace(target, ttft_s=target.ttft_s * stretch) for tier, target in targets.items()}
