"""``runner.measure.measured`` with blocks and trainings that take no time."""

from runner.measure import measured

measured.BLOCK_SECONDS = measured.TRAIN_SECONDS = 0.02
main = measured.main
