"""Names of the schedules of the runner, for completion in a shell, which imports no pydantic."""

SCHEDULE_KINDS = (
    "constant",
    "cosine",
    "cosine_restarts",
    "inverse_sqrt",
    "linear",
    "one_cycle",
    "plateau",
    "polynomial",
    "step",
)
