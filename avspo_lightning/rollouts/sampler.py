"""What becomes of collapsed groups before the update."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class GroupSampler(ABC):
    """Decides which groups of an iteration are trained on; every rank decides for all of them alike."""

    @abstractmethod
    def keep(self, collapsed: Tensor) -> Tensor:
        """Bool [N], the groups that are trained on.

        Args:
            collapsed: bool [N], the groups whose rewards are all alike after augmentation.
        """


class KeepAll(GroupSampler):
    """Trains on every group. A collapsed one has no gradient, but its tokens count in the loss's denominator."""

    def keep(self, collapsed: Tensor) -> Tensor:
        """All of them."""
        return collapsed | True


class FilterDrop(GroupSampler):
    """Leaves collapsed groups out of the loss and of its denominator, and asks for no others in their place.

    Where none is left the optimizer step is skipped. The gradient is that of KeepAll times N / N_kept under a mean over
    sequences: with a gradient clip that binds, or under Adam, hardly anything changes.
    """

    def keep(self, collapsed: Tensor) -> Tensor:
        """Those that have not collapsed."""
        return ~collapsed
