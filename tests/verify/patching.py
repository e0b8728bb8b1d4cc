"""What a stage of ``wrong_everywhere`` puts into everybody's place: a module that it imports, and no plugin file."""

from torch.nn import functional


def group_norm(self, x):
    """That of ``nn.GroupNorm`` with another epsilon."""
    return functional.group_norm(x, self.num_groups, self.weight, self.bias, 1.1 * self.eps)
