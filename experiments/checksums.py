"""Do two versions of the program train to the same bits? Small runs of every kind, on CPUs, and a checksum of each.

    python experiments/checksums.py --output before.json                      in the one checkout
    python experiments/checksums.py --against before.json                     in the other, on the same machine

Runs go through the command line alone, so that the insides may change as they like.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL = """--model.dim 32 --model.num-layers 4 --model.num-heads 4 --model.num-kv-heads 2 --model.hidden-dim 64
 --model.sequence-length 32 --train.device cpu --train.steps 8 --train.microbatch-size 2 --pipeline.stages 2
 --pipeline.microbatches 4 --pipeline.transport thread --evaluation.batches 2 --evaluation.every-steps 3
 --optimizer.learning-rate 0.01 --optimizer.warmup-steps 2 --checkpoint.every-minutes 0"""
EXPERTS = "--model.num-experts 4 --model.experts-per-token 2 --model.expert-dim 16 --model.num-dense-layers 1"
CASES: dict[str, list[str]] = {
    "two_bw, Muon with error feedback": [""],
    "two_bw, double depth, four stages": ["--pipeline.stages 4 --pipeline.microbatches 8 --pipeline.depth double"],
    "two_bw after a synchronous start": ["--pipeline.sync-start-steps 3"],
    "one_f_one_b": ["--pipeline.schedule one_f_one_b --optimizer.error-feedback 0"],
    "gpipe": ["--pipeline.schedule gpipe --optimizer.error-feedback 0"],
    "pipedream": ["--pipeline.schedule pipedream --pipeline.stages 3"],
    "paci": ["--pipeline.schedule paci --optimizer.error-feedback 0"],
    "AdamW, clipped": ["--optimizer.name adamw --optimizer.clip-norm 0.1"],
    "SGD of torch": ["--optimizer.name torch.optim.SGD"],
    "float64": ["--train.dtype float64"],
    "masters in float64, computing in float32": ["--train.dtype float64 --train.compute-dtype float32"],
    "two replicas": ["--pipeline.replicas 2 --pipeline.microbatches 2"],
    "two replicas that share the optimizer": [
        "--pipeline.replicas 2 --pipeline.microbatches 2 --optimizer.sharded --train.dtype float64"
    ],
    "tied, with loss in chunks and recomputed blocks": [
        "--model.tied-embeddings True --train.loss-chunk-tokens 16 --train.recompute-every 2"
    ],
    "experts": [EXPERTS],
    "processes": ["--pipeline.transport process"],
    "resumed on four stages": ["", "--train.steps 12 --pipeline.stages 4 --checkpoint.resume"],
    "reshaped during the run": ["--pipeline.transport process --pipeline.reshape 3=4 6=2"],
}
"""By name: the options of one command after another, in the same folder."""


def checksum(options: list[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        for each in options:
            command = ["train", *SMALL.split(), *each.split(), "--run.folder", folder, "--run.name", "run"]
            _run(command)
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text(encoding="utf-8"))
        return str(summary["parameter_checksum"])


def _run(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "slipstream", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"slipstream {' '.join(arguments)}\n{done.stdout[-1000:]}{done.stderr[-1000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write them here")
    parser.add_argument("--against", type=Path, help="compare with what another command has written")
    given = parser.parse_args()
    expected = json.loads(given.against.read_text(encoding="utf-8")) if given.against else {}
    found, differ = {}, 0
    for name, options in CASES.items():
        found[name] = checksum(options)
        verdict = ""
        if given.against:
            is_same = expected.get(name) == found[name]
            differ += not is_same
            verdict = "  the same" if is_same else f"  DIFFERS from {expected.get(name)}"
        print(f"{name:50} {found[name]}{verdict}", flush=True)
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.against:
        print(f"{len(found) - differ} of {len(found)} the same")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
