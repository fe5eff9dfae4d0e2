"""A convolutional network of your own, trained across two stages: python examples/convnet.py"""

from functools import partial

import torch
from torch import nn

from slipstream import Pipeline, launch


def layers():
    torch.manual_seed(0)  # every stage builds the same weights and keeps its own part of them
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU()]
    return [*convolutions, nn.Flatten(), nn.Linear(256, 8)]


def data(step, microbatch):  # which of an image's eight rows is the bright one?
    generator = torch.Generator().manual_seed(4 * step + microbatch)
    images, rows = torch.randn(32, 1, 8, 8, generator=generator), torch.randint(8, (32,), generator=generator)
    images[torch.arange(32), 0, rows] += 1.0
    return images, rows


def worker(transport):  # runs once per stage
    pipeline = Pipeline(
        transport, layers(), data=data, loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
        num_microbatches=4, num_steps=100, error_feedback=1.0, clip_norm=1.0,
    )  # fmt: skip
    losses = [report.loss for report in pipeline.run()]
    print(f"stage {transport.stage}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return pipeline.weights()


if __name__ == "__main__":
    launch(worker, num_stages=2)
