"""``python -P -m runner.child MODULE DESCRIPTOR``: a child process, started by ``Child``."""

import sys
from multiprocessing.connection import Connection

from runner.child.protocol import attend

if __name__ == "__main__":
    attend(sys.argv[1], Connection(int(sys.argv[2])))
