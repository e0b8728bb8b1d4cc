"""Compares exported programs with the same programs simplified by OnnxSlim.

pip install -c constraints.txt -e '.[inference]' onnxslim
python experiments/refused/onnx_simplification.py
"""

import io

import onnx
import onnxruntime
import onnxslim
import torch
from recording import Figure, record, speed
from torch import Tensor, nn
from torchscript import networks


def figures_of(name: str, network: nn.Module, x: Tensor) -> list[Figure]:
    """Returns the changes of speed, bytes and nodes of a network's program."""
    file = io.BytesIO()
    torch.onnx.export(network.eval(), (x,), dynamo=True, verbose=False).save(file)
    program = onnx.load_from_string(file.getvalue())
    simplified = onnxslim.slim(program)
    before, after = (session_of(model) for model in (program, simplified))
    inputs = {before.get_inputs()[0].name: x.numpy()}
    for expected, answer in zip(before.run(None, inputs), after.run(None, inputs), strict=True):
        torch.testing.assert_close(torch.from_numpy(answer), torch.from_numpy(expected))
    saved = 100 * (1 - simplified.ByteSize() / program.ByteSize())
    nodes = f"{len(program.graph.node)} nodes, {len(simplified.graph.node)} afterwards"
    return [
        speed(f"time_{name}", name, lambda: before.run(None, inputs), lambda: after.run(None, inputs)),
        Figure(f"bytes_{name}", f"bytes, {name}", saved, "%", None, "", f"bytes of the program; {nodes}"),
    ]


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Returns a session with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


@torch.no_grad()
def main() -> None:
    """Measures and records."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    figures = [figure for name, pair in networks().items() for figure in figures_of(name, *pair)]
    conclusion = "The exporter and ONNX Runtime simplify a program already; doing it in between gains nothing."
    record("onnx_simplification", "ONNX simplification", conclusion, figures)


if __name__ == "__main__":
    main()
