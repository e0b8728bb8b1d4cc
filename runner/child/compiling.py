"""Whoever imports this knows for which vector instructions a compiler builds here.

torch asks that in every process that compiles for a CPU, by loading a library for each in a process of its own, built
where there is none yet. That took 8 s on one Xeon, and copies of a process that has imported this need not do it.
"""

from contextlib import suppress

from torch._inductor.cpu_vec_isa import valid_vec_isa_list

# An error here would end the process that others are copies of; whoever compiles says better what is wrong.
with suppress(Exception):
    valid_vec_isa_list()
