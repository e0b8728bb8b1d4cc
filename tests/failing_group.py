"""A group of child processes, one of which has no memory left while the others wait for it."""

from runner.distributed.membership import connected


def main(parent):
    with connected(parent.options["group"], "cpu", 30.0) as group:
        if group.rank == 1:
            raise MemoryError("no memory in the second process")
        group.gather(None)
        parent.tell()
