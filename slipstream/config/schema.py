"""The whole configuration of a run, as one tree of frozen dataclasses.

The command line is generated from it, a TOML file mirrors it, and a run writes its resolved form into its folder.
Importing this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

BUILTIN = "builtin"
"""The corpus that is always there."""

MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS = 0.01, 1e6
"""No stage is always faster than the one; the other is some eleven days: longer than anyone waits, and short enough for
every clock it is handed to."""


@dataclass(frozen=True)
class ModelSection:
    name: str = "decoder"
    """decoder, or the import path of a model of your own: see slipstream/model/spec.py."""
    arguments: dict[str, float] = field(default_factory=dict)
    """Fields of a model of your own: {width = 64} in TOML, width 64 on the command line."""
    preset: str = "tiny"
    """tiny, small, 135m, 360m, 1b, 3b, 8b, 10b or 70b; moe-2b or moe-10b, with experts."""
    vocab_size: int | None = None
    """None: the preset's, or the corpus's if that is larger."""
    sequence_length: int | None = None
    """Tokens in a sequence. None: the preset's; likewise below."""
    dim: int | None = None
    """Width of the residual stream."""
    num_layers: int | None = None
    """Blocks between the embedding and the head."""
    num_heads: int | None = None
    """Query heads of a block."""
    num_kv_heads: int | None = None
    """Key and value heads of a block."""
    hidden_dim: int | None = None
    """Width inside the SwiGLU of a dense block."""
    tied_embeddings: bool | None = None
    """Whether embedding and head share one matrix."""
    num_experts: int | None = None
    """Routed experts of a block; 0: all blocks are dense."""
    experts_per_token: int | None = None
    """How many of them a token goes through, at least 2."""
    expert_dim: int | None = None
    """Width inside the SwiGLU of one expert."""
    num_shared_experts: int | None = None
    """Experts that every token goes through besides."""
    num_dense_layers: int | None = None
    """Blocks at the beginning that have no experts."""


@dataclass(frozen=True)
class DataConfig:
    sources: tuple[str, ...] = (BUILTIN,)
    """Files (.txt, .jsonl, .bin), folders or globs; "builtin" is the source of Python's standard library."""
    validation_sources: tuple[str, ...] = ()
    """Files, folders or globs held out for validation; without any, a part of `sources` is."""
    validation_fraction: float = 0.05
    """The part held out: the end of the tokens, or whole files of "builtin"; shards may bring their own."""
    tokenizer: str = "bytes"
    """Makes tokens of text: "bytes", or a tokenizer.json or its folder (needs slipstream[text]); shards had theirs."""
    end_of_text: str | None = None
    """The tokenizer's token that ends a document. None: found by its usual names. "none": documents have no end."""
    text_field: str = "text"
    """The field of a .jsonl object that holds its text."""
    loader: str = "files"
    """What reads the corpus: "files", or the import path of a function of your own: see slipstream/data/loaders.py."""
    token_dtype: Literal["uint8", "uint16", "uint32"] | None = None
    """Type of the ids in .bin shards that have no .json beside them."""


@dataclass(frozen=True)
class PipelineSection:
    schedule: str = "two_bw"
    """two_bw, one_f_one_b, gpipe, pipedream or paci."""
    stages: int = 2
    """Components the layers are cut into, each with a process (under torchrun: a rank) of its own."""
    replicas: int = 1
    """Copies of the whole pipeline, each with its own microbatches of every step: stages x replicas processes."""
    placement: Literal["pipeline", "replica"] = "pipeline"
    """Which processes have consecutive ranks: the stages of a replica, or the replicas of a stage."""
    microbatches: int = 4
    """To a step of each replica. two_bw wants at least one per stage, and twice that less one at double depth."""
    depth: str = "minimum"
    """two_bw: "double" keeps twice the forwards in flight and hides the latency of links."""
    sync_start_steps: int = 0
    """Steps to train synchronously before the asynchronous schedule begins."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of every stage, embedding and head counted as one each; empty: balanced by their cost."""
    profile: str = ""
    """What slipstream profile wrote: the layers' measured costs, to balance the stages by; empty: by their FLOPs."""
    reshape: tuple[str, ...] = ()
    """Change the number of stages on the way: "100=4" makes four of them after 100 steps, "100=2x2" two in each of two
    replicas, "100=2/5,5" two of five layers. Weights and optimizer move from memory to memory."""
    processes: int | None = None
    """Processes at hand, for slipstream reshape: those that have no stage stand by. None: as many as pipeline.stages x
    pipeline.replicas or pipeline.reshape come to."""
    transport: Literal["process", "thread"] = "process"
    """Stages as processes, or as threads of one process (several stages on one GPU)."""
    backend: Literal["auto", "gloo"] = "auto"
    """Between processes: NCCL between GPUs and gloo between CPUs; or gloo between GPUs too, through the hosts' memory,
    which lets several stages have one GPU."""
    share_gpu: bool = False
    """More processes than GPUs, over NCCL: tests a pipeline of GPUs on a machine with one. Each process then counts as
    a host of its own, and messages go over sockets."""
    shared_memory: bool = True
    """Processes of one machine exchange activations in shared memory, on CPUs; false: by gloo, as between machines."""
    timeout_seconds: float = 300.0
    """How long a stage waits for another before it gives up and says what it waited for."""


@dataclass(frozen=True)
class OptimizerSection:
    name: str = "muon"
    """muon, normuon, soap or scion (hidden matrices; AdamW takes the rest), adamw, adan, lion, mars or nadamw, or any
    class by its import path: torch.optim.SGD."""
    learning_rate: float | None = None
    """Peak rate; where AdamW takes the rest, of the matrices. None: the best of our sweep for this optimizer, such as
    0.02 for muon and 0.001 for adamw, or what a class of torch's has by itself."""
    adamw_learning_rate: float | None = None
    """Peak rate of embedding, head, norms and routers where AdamW takes them beside another. None: 0.003."""
    balance_rate: float | None = None
    """Experts: by how much a step raises or lowers an expert's chance to be chosen, to even out the load; follows the
    learning rate's schedule. None: 0.001."""
    arguments: dict[str, float] = field(default_factory=dict)
    """A class by its import path: further arguments, {momentum = 0.9} in TOML, momentum 0.9 on the command line. Those
    that slipstream/optim/recipes.py gives normuon, soap, scion, adan, lion, mars and nadamw can be changed likewise."""
    momentum: float = 0.95
    """muon: of the matrices."""
    beta1: float = 0.9
    """adamw, and the part AdamW takes beside another: decay of the mean."""
    beta2: float = 0.95
    """Likewise, of the mean square."""
    adamw_nesterov: bool = False
    """Likewise: look one step ahead along the mean."""
    adamw_predictor: Literal["nesterov", "last"] | None = None
    """Likewise: what error feedback expects of the next update, the last one again or, as if with adamw_nesterov, one
    that turns with the mean. None: nesterov for adamw, last beside another, where it made no difference."""
    nesterov: bool = True
    """muon: look ahead along the momentum."""
    lookahead: float | None = None
    """muon, with nesterov: how many steps ahead; the more, the more the newest gradient counts. None: one."""
    newton_schulz_steps: int = 5
    """muon: iterations that make an update orthogonal."""
    newton_schulz_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """muon: what they compute in. None: bfloat16 on a GPU, float32 on a CPU."""
    weight_decay: float = 0.1
    """Decoupled, times the learning rate; never extrapolated by error feedback."""
    clip_norm: float = 1.0
    """Every parameter group's gradient is scaled down to this norm, taken over all stages; 0: no clipping."""
    sharded: bool = False
    """The replicas of a stage share its optimizer: each keeps weights and state of a part of the parameters, steps
    them, and hands them to the others (ZeRO-1)."""
    error_feedback: float = 1.0
    """lam: how much of the one-step prediction to apply; 0 is plain delay. No effect while synchronous."""
    schedule: str = "cosine"
    """Learning rate by update: constant, cosine, linear or wsd, after a linear warm-up."""
    horizon_steps: int | None = None
    """Steps that warm-up and schedule are laid out for; the rate then stays where it is. None: train.steps, so that a
    run which goes on for longer than planned changes its rate."""
    warmup_steps: int | None = None
    """None: a tenth of all steps, and 1,000 at most."""
    decay_steps: int | None = None
    """wsd: the steps at the end in which the rate falls; None: a fifth of all steps."""
    final_fraction: float = 0.1
    """The rate at the end, as a share of the peak."""


@dataclass(frozen=True)
class TrainSection:
    steps: int = 200
    """Updates to make."""
    microbatch_size: int = 4
    """Sequences in a microbatch."""
    seed: int = 0
    """Of the weights and of the order of the data."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the stages compute; auto: on GPUs if there are enough. There a stage that is a process wants one of its
    own, unless pipeline.share_gpu is set."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of the weights that the optimizer steps, and of its state."""
    compute_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """Of the working copies of the weights, of activations and messages. None: bfloat16 on a GPU if train.dtype is
    float32, otherwise train.dtype."""
    gradient_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """That the gradients of a step's microbatches are added up in. None: train.dtype."""
    reduction_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """That the gradients of replicas are added up in, and travel in; those of tied weights travel in it between stages.
    None: train.gradient_dtype."""
    non_finite: Literal["raise", "skip"] = "raise"
    """An inf or nan in loss or gradient stops the run, or costs one update, on all stages alike."""
    track_alignment: bool = True
    """Log the cosine of each update and what was expected of it; without error feedback that keeps one more copy of the
    weights."""
    loss_chunk_tokens: int = 0
    """Tokens whose logits exist at a time: head and loss go over a microbatch in chunks of so many; 0: all at once."""
    recompute_every: int = 0
    """Every n-th block keeps its input alone and is computed again in the backward; 1: all blocks, 0: none."""
    compile: bool = False
    """Run the blocks through torch.compile, all that are alike through one graph: fewer kernels, the same numbers up to
    rounding. The first microbatches wait for the compiler."""


@dataclass(frozen=True)
class EvaluationSection:
    every_steps: int = 50
    """0: only at the end. The held-out set passes through without a drain."""
    batches: int = 8
    """Microbatches of held-out text; 0: no evaluation."""


@dataclass(frozen=True)
class CheckpointSection:
    every_steps: int = 0
    """Save after every so many steps; 0: not by steps."""
    every_minutes: float = 30.0
    """Save when so many minutes have passed; 0: not by the clock."""
    at_end: bool = True
    """Save after the last step. After SIGTERM or Ctrl-C, which stop a run within a few steps, and after SIGUSR1, which
    does not, it is saved in any case. A second Ctrl-C ends it at once."""
    keep_last: int = 2
    """How many checkpoints stay, the newest of them."""
    keep_every: int = 0
    """Those of every so many steps stay too; 0: none."""
    resume: bool = False
    """Go on from the run's newest complete checkpoint. Where there is none, begin."""


@dataclass(frozen=True)
class RunSection:
    name: str = "default"
    """The run's folder below `folder`."""
    folder: str = "runs"
    """Where runs are kept."""
    overwrite: bool = False
    """Replace an earlier run of the same name."""
    sinks: tuple[str, ...] = ()
    """Import paths of classes that receive the metrics besides metrics.jsonl: see slipstream/observe/sinks.py."""
    log_every_steps: int = 10
    """How often a line is printed where there is no terminal to draw a progress bar on."""
    trace_actions: int = 512
    """How many of every stage's latest actions go into trace.json; at most 4,096 are kept."""


@dataclass(frozen=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    train: TrainSection = field(default_factory=TrainSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    run: RunSection = field(default_factory=RunSection)
