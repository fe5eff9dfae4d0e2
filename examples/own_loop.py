"""A training loop of your own that saves, resumes, evaluates and logs.

python examples/own_loop.py --folder runs/own                  # two stages; again: resumes where it was interrupted
torchrun --nproc-per-node 2 examples/own_loop.py --folder runs/own
python examples/own_loop.py --folder runs/own --stages 3 --steps 400
"""

import argparse
from functools import partial

import torch
from torch import nn

from slipstream import Checkpoints, Evaluation, Metrics, Pipeline, StepReport, launch, load_weights


def layers():
    return [nn.Embedding(10, 32), nn.Flatten(), nn.Linear(4 * 32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(),
            nn.Linear(64, 10)]  # fmt: skip


def data(step, microbatch):  # four digits: which is the largest?
    generator = torch.Generator().manual_seed(4 * step + microbatch)
    digits = torch.randint(10, (64, 4), generator=generator)
    return digits, digits.amax(1)


def worker(transport, model, folder, num_steps, sinks):  # runs once per stage
    with Checkpoints(transport, folder) as checkpoints:
        pipeline = Pipeline(
            transport, model, data=data, loss=nn.functional.cross_entropy,
            optimizer=partial(torch.optim.AdamW, lr=0.003, weight_decay=0.0), error_feedback=1.0,
            num_microbatches=4, num_steps=num_steps,
            evaluation=Evaluation(lambda batch: data(10**6, batch), num_batches=8, every_steps=50),
            start=checkpoints.load(),  # None if there is no checkpoint
        )  # fmt: skip
        with Metrics(pipeline, folder, tokens_per_step=4 * 64, log_every_steps=50, sinks=sinks) as metrics:
            for report in pipeline.run():
                metrics.log(report)
                if isinstance(report, StepReport) and (report.step + 1) % 50 == 0:
                    checkpoints.save(pipeline)
        checkpoints.save(pipeline)
    return transport.stage


def main(folder, num_stages=2, num_steps=300, sinks=(), **options):
    torch.manual_seed(0)  # every process builds the same weights, and each stage keeps its own part of them
    model = nn.Sequential(*layers())
    given = {"model": model, "folder": folder, "num_steps": num_steps, "sinks": sinks}
    return launch(partial(worker, **given), num_stages, **options)


def accuracy(folder):  # the weights of all stages, in an ordinary torch model
    model = nn.Sequential(*layers())
    model.load_state_dict(load_weights(folder))
    digits, answers = data(10**6, 0)
    return (model(digits).argmax(1) == answers).float().mean().item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/own")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sinks", nargs="*", default=())
    options = parser.parse_args()
    if 0 in main(options.folder, options.stages, options.steps, options.sinks):  # torchrun: one stage in each process
        print(f"accuracy {accuracy(options.folder):.0%}")
