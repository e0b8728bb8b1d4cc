"""Compares TorchScript with eager code and with an exported program.

python experiments/refused/torchscript.py
"""

import io
import warnings

import onnxruntime
import torch
from recording import Figure, record, speed
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 128
HEADS = 4
LENGTH = 32


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the stream after this block, [B, T, width]."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Branching(nn.Module):
    """A network whose result depends on a comparison of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's result, negated for inputs with a negative sum."""
        y: Tensor = self.inner(x)
        return y if x.sum() > 0 else -y


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Returns networks with an input for one request."""
    perceptron = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return {
        "perceptron": (perceptron, torch.randn(1, 64)),
        "transformer": (nn.Sequential(Block(), Block()), torch.randn(1, LENGTH, WIDTH)),
    }


def figures_of(name: str, network: nn.Module, x: Tensor) -> list[Figure]:
    """Returns the speed of TorchScript and of an ONNX program relative to eager code."""
    network.eval()
    traced = torch.jit.freeze(torch.jit.trace(network, x))
    file = io.BytesIO()
    torch.onnx.export(network, (x,), dynamo=True, verbose=False).save(file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file.getvalue(), options)
    inputs = {session.get_inputs()[0].name: x.numpy()}
    torch.testing.assert_close(traced(x), network(x))
    return [
        speed(f"jit_{name}", f"TorchScript, {name}", lambda: network(x), lambda: traced(x)),
        speed(f"onnx_{name}", f"ONNX, {name}", lambda: network(x), lambda: session.run(None, inputs)),
    ]


def frozen_branch() -> Figure:
    """Returns the share of inputs for which a traced branch silently gives a wrong result."""
    network = Branching().eval()
    inputs = torch.randn(200, 4)
    positive = inputs[inputs.sum(1) > 0][0]
    traced = torch.jit.trace(network, positive, check_trace=False)
    wrong = sum(not torch.equal(traced(x), network(x)) for x in inputs)
    share = 100 * wrong / len(inputs)
    text = f"{share:.0f} % of the answers wrong, no error"
    method = "200 inputs of a network with a branch, traced with one of them"
    return Figure("branch", "a traced branch", share, "% wrong", None, text, method)


def exported_branch() -> Figure:
    """Returns whether export refuses the same network."""
    try:
        torch.export.export(Branching().eval(), (torch.randn(4),))
    except Exception as error:
        refusal = type(error).__name__
    else:
        refusal = ""
    text = "refused with the line of the branch" if refusal else "accepted"
    return Figure("export", "the same network exported", bool(refusal), "refused", None, text, refusal)


@torch.no_grad()
def main() -> None:
    """Measures and records."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # TorchScript is deprecated, and each call of it warns.
    warnings.simplefilter("ignore")
    figures = [figure for name, pair in networks().items() for figure in figures_of(name, *pair)]
    figures += [frozen_branch(), exported_branch()]
    conclusion = "TorchScript is deprecated, and a trace keeps one side of a branch; the stage `export` replaces it."
    record("torchscript", "TorchScript", conclusion, figures)


if __name__ == "__main__":
    main()
