"""One way to run a part of the runner in a child process: spawn, limits, protocol, outcome."""
