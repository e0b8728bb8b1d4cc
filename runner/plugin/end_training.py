"""The exception with which a source or a learner ends a training."""


class EndTraining(Exception):  # noqa: N818 (it is no failure)
    """Ends the training as finished before its length; the text is the reason.

    A source raises it in ``draw``, a learner in ``update`` before it has changed anything, because
    the update in which it is raised is not counted.
    """
