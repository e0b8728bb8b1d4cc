"""Whoever imports this knows for which vector instructions a compiler builds here.

torch asks that in every process that compiles for a CPU, by building a library for each and loading it in a process of
its own: up to eight seconds, which copies of a process that has imported this do not need.
"""

from contextlib import suppress

from torch._inductor.cpu_vec_isa import valid_vec_isa_list

with suppress(RuntimeError):  # there is no compiler, which the stage that wants one says better
    valid_vec_isa_list()
