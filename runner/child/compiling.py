"""Determines, when it is imported, the vector instructions for which a compiler can build here.

torch determines that in every process that compiles for a CPU: it loads one library per instruction
set in a separate process, and builds it if necessary. That took 8 s on one Xeon. Copies of a
process that has imported this module need not repeat it.
"""

from contextlib import suppress

from torch._inductor.cpu_vec_isa import valid_vec_isa_list

# An error here would end the process that others are copies of; a later
# compilation reports it in more detail.
with suppress(Exception):
    valid_vec_isa_list()
