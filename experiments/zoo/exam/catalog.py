"""All groups of the exam."""

from exam import accumulation, clocks, kernels, miscompiled, precision, ranks

GROUPS = {
    module.GROUP.letter: module.GROUP for module in (miscompiled, kernels, accumulation, ranks, precision, clocks)
}
ENTRIES = {entry.name: entry for group in GROUPS.values() for entry in group.entries}
