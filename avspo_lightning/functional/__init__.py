"""The method as pure functions: tensors in, tensors out."""

from avspo_lightning.functional.advantages import augmented_rewards, avspo_advantages, group_advantages
from avspo_lightning.functional.collapse import (
    advantage_collapse_rate,
    all_right_groups,
    all_wrong_groups,
    as_rewards,
    collapsed_groups,
    pack_groups,
    scorable_groups,
    unpack_groups,
)
from avspo_lightning.functional.logprobs import (
    TokenStatistics,
    logprobs_from_hidden,
    self_certainty,
    token_entropy,
    token_logprobs,
)
from avspo_lightning.functional.losses import PolicyLoss, aggregate, kl_divergence, policy_loss
from avspo_lightning.functional.passk import avg_at_k, majority_at_k, pass_at_k
from avspo_lightning.functional.threshold import check_threshold_options, next_threshold
from avspo_lightning.functional.virtual_samples import (
    num_virtual_samples,
    num_virtual_triggered,
    virtual_rewards,
)

__all__ = [
    "PolicyLoss",
    "TokenStatistics",
    "advantage_collapse_rate",
    "aggregate",
    "all_right_groups",
    "all_wrong_groups",
    "as_rewards",
    "augmented_rewards",
    "avg_at_k",
    "avspo_advantages",
    "check_threshold_options",
    "collapsed_groups",
    "group_advantages",
    "kl_divergence",
    "logprobs_from_hidden",
    "majority_at_k",
    "next_threshold",
    "num_virtual_samples",
    "num_virtual_triggered",
    "pack_groups",
    "pass_at_k",
    "policy_loss",
    "scorable_groups",
    "self_certainty",
    "token_entropy",
    "token_logprobs",
    "unpack_groups",
    "virtual_rewards",
]
