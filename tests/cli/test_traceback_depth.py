"""Few functions of the runner are between a command and a network: a user reads them in every traceback."""

import sys
from pathlib import Path

from running import forked
from toy_runs import written

MOST_FRAMES = 11
"""From ``main`` to the call of the network."""
PLUGIN = """
import sys
from pathlib import Path
from typing import ClassVar
from toys import Toy, ToyConfig
from torch import nn
from torch.nn.functional import cross_entropy
from runner.api import Loss

class DeepConfig(ToyConfig):
    kind: ClassVar[str] = "deep"
    implementation = "Deep"

class Network(nn.Sequential):
    calls = 0

    def forward(self, words):
        # Observers of the first updates are gone by then.
        Network.calls += 1
        if Network.calls == 90:
            Path(__file__).with_name("frames.txt").write_text("\\n".join(frames()))
        return super().forward(words)

def frames():
    frame = sys._getframe(1)
    while frame is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
        frame = frame.f_back

class Deep(Toy):
    def build(self, config, shapes, context):
        return Network(*super().build(config, shapes, context))
"""


def test_a_network_is_at_most_eleven_functions_below_main(tmp_path):
    (tmp_path / "deep.py").write_text(PLUGIN)
    words = written(tmp_path, "model.kind=deep", "train.updates=95", "train.log_every=95")
    child = forked(*words, "--plugin", str(tmp_path / "deep.py"))
    assert child.returncode == 0, child.stderr
    frames = (tmp_path / "frames.txt").read_text().splitlines()
    names = [frame.rpartition(":")[2] for frame in frames]
    below = frames[: len(names) - names[::-1].index("main")]
    package = str(Path(sys.modules["runner"].__file__).parent)
    own = [frame for frame in below if frame.startswith(package)]
    # The author's loss is one more function on the way, and the network's own forward is where it ends.
    assert 5 < len(own) + 1 <= MOST_FRAMES, "\n".join(own)
