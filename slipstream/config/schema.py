"""The whole configuration of a run, as one tree of frozen dataclasses.

The command line is generated from it, a TOML file mirrors it, and a run writes its resolved form into its folder.
Importing this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

BUILTIN = "builtin"
"""The corpus that is always there."""


@dataclass(frozen=True)
class ModelSection:
    name: str = "decoder"
    """decoder, or the import path of a model of your own: see slipstream/model/spec.py."""
    arguments: dict[str, float] = field(default_factory=dict)
    """Fields of a model of your own: {width = 64} in TOML, width 64 on the command line."""
    initial: str = ""
    """A folder of Hugging Face to start from: its config.json is the model, its safetensors are the weights. The preset
    is not used then."""
    hf: str = ""
    """A config.json of transformers, or a folder with one, whose model is trained as transformers computes it (needs
    slipstream[hf]). If the folder has weights, the run starts from them. The preset is not used then."""
    preset: str = "tiny"
    """One of tiny, small, 135m, 360m, 1b, 3b, 8b, 10b and 70b; with experts moe-2b and moe-10b."""
    vocab_size: int | None = None
    """Entries of the vocabulary. None: those of the preset, or of the corpus if it has more."""
    sequence_length: int | None = None
    """Tokens in a sequence. None: as in the preset. The same holds for the fields below."""
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
    """Routed experts of a block. 0: all blocks are dense."""
    experts_per_token: int | None = None
    """How many routed experts a token goes through, at least 2."""
    expert_dim: int | None = None
    """Width inside the SwiGLU of one expert."""
    num_shared_experts: int | None = None
    """Experts that every token goes through in addition."""
    num_dense_layers: int | None = None
    """Blocks at the beginning that have no experts."""
    head_dim: int | None = None
    """Width of a head. None: as in the preset, which is dim / num_heads."""
    qk_norm: bool | None = None
    """Whether queries and keys are normalised, as in Qwen3."""
    qkv_bias: bool | None = None
    """Whether queries, keys and values have a bias, as in Qwen2."""
    rope_base: float | None = None
    """Base of the rotary wavelengths."""
    rope_scaling: tuple[float, ...] | None = None
    """Stretches the rotary wavelengths as Llama 3.1 does: factor, low_freq_factor, high_freq_factor and
    original_max_position_embeddings."""
    norm_eps: float | None = None
    """Number added to the mean square inside every RMSNorm."""


@dataclass(frozen=True)
class DataConfig:
    sources: tuple[str, ...] = (BUILTIN,)
    """Files (.txt, .jsonl, .jsonl.gz, .jsonl.zst, .bin), folders or globs. "builtin" is the source code of Python's
    standard library."""
    validation_sources: tuple[str, ...] = ()
    """Files, folders or globs that are held out for validation. If empty, a part of `sources` is held out."""
    weights: tuple[float, ...] = ()
    """Share of the training sequences that comes from each of `sources`, in their order: 0.7 0.3, or 7 3. If empty,
    all sources are read as one text."""
    validation_fraction: float = 0.05
    """The part that is held out: the end of the tokens (with `weights`: of each source), or whole files of "builtin".
    Shards may bring their own."""
    tokenizer: str = "bytes"
    """Turns text into tokens: "bytes", or a tokenizer.json or its folder, or hf:NAME, that of a model of the Hugging
    Face Hub (needs slipstream[text]). Shards are tokens already."""
    end_of_text: str | None = None
    """The token of the tokenizer that ends a document. None: it is found by its usual names. "none": documents have no
    end token. For shards whose tokenizer is unknown: its id."""
    separate_documents: bool = False
    """Whether attention and positions begin anew with every document. Otherwise tokens also see what stands before
    their document in the same row."""
    text_field: str = "text"
    """The field of a .jsonl object that holds its text."""
    loader: str = "files"
    """What reads the corpus: "files", or the import path of a function of your own: see slipstream/data/loaders.py."""
    token_dtype: Literal["uint8", "uint16", "uint32"] | None = None
    """Type of the ids in .bin shards that neither a .json file nor a header of Megatron or llm.c describes."""


@dataclass(frozen=True)
class PipelineSection:
    schedule: str = "two_bw"
    """One of two_bw, one_f_one_b, gpipe, pipedream and paci."""
    stages: int = 2
    """Parts into which the layers are cut. Each has its own process (under torchrun: its own rank)."""
    replicas: int = 1
    """Copies of the whole pipeline. Each has its own microbatches of every step. There are stages x replicas
    processes."""
    placement: Literal["pipeline", "replica"] = "pipeline"
    """Which processes have consecutive ranks: the stages of a replica, or the replicas of a stage."""
    microbatches: int = 4
    """Microbatches in a step of each replica. two_bw needs at least as many as stages, and twice as many minus one at
    double depth."""
    depth: str = "minimum"
    """two_bw: "double" keeps twice as many forwards in flight and hides the latency of links."""
    sync_start_steps: int = 0
    """Steps that run synchronously before the asynchronous schedule begins."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of every stage. Embedding and head count as one layer each. Empty: balanced by cost."""
    profile: str = ""
    """A file of slipstream profile: measured costs of layers, to balance the stages. Empty: balanced by FLOPs."""
    reshape: tuple[str, ...] = ()
    """Changes the layout during the run: "100=4" makes four stages after 100 steps, "100=2x2" two stages in each of two
    replicas, "100=2/5,5" two stages of five layers. Weights and optimizer state move from memory to memory."""
    processes: int | None = None
    """Processes that the run starts, for slipstream reshape. Those without a stage are idle. None: as many as
    pipeline.stages x pipeline.replicas or pipeline.reshape need."""
    transport: Literal["process", "thread"] = "process"
    """Stages are processes, or threads of one process (several stages on one GPU)."""
    backend: Literal["auto", "gloo"] = "auto"
    """Between processes. auto: NCCL between GPUs and gloo between CPUs. gloo: also between GPUs, through host memory,
    so that several stages can share a GPU."""
    share_gpu: bool = False
    """Allows more processes than GPUs over NCCL, to test a pipeline of GPUs on a machine with one. Each process then
    counts as its own host, and messages go over sockets."""
    shared_memory: bool = True
    """Processes of one machine exchange activations through shared memory, on CPUs. false: over gloo, as between
    machines."""
    timeout_seconds: float = 300.0
    """How long a stage waits for another before it gives up and says what it waited for."""


@dataclass(frozen=True)
class OptimizerSection:
    name: str = "muon"
    """One of muon, normuon, soap and scion (hidden matrices; AdamW updates the rest), adamw, adan, lion, mars and
    nadamw, or the import path of any class, such as torch.optim.SGD."""
    learning_rate: float | None = None
    """Peak learning rate. Where AdamW updates the rest, it is the rate of the matrices. None: the best rate of our
    sweep for this optimizer, such as 0.02 for muon and 0.001 for adamw, or the default of a torch class."""
    adamw_learning_rate: float | None = None
    """Peak learning rate of embedding, head, norms and routers where AdamW updates them beside another optimizer. None:
    0.003."""
    balance_rate: float | None = None
    """Experts: how much a step changes the chance of an expert to be chosen, to balance the load. Follows the schedule
    of the learning rate. None: 0.001."""
    arguments: dict[str, float] = field(default_factory=dict)
    """Further arguments of a class that is given by its import path: {momentum = 0.9} in TOML, momentum 0.9 on the
    command line. Those of normuon, soap, scion, adan, lion, mars and nadamw (slipstream/optim/recipes.py) can be
    changed too."""
    momentum: float = 0.95
    """muon: momentum of the matrices."""
    beta1: float = 0.9
    """AdamW, alone or beside another optimizer: decay of the mean."""
    beta2: float = 0.95
    """AdamW, alone or beside another optimizer: decay of the mean square."""
    adamw_nesterov: bool = False
    """AdamW, alone or beside another optimizer: look one step ahead along the mean."""
    adamw_predictor: Literal["nesterov", "last"] | None = None
    """AdamW, alone or beside another optimizer: what error feedback expects of the next update. last: the last update
    again. nesterov: an update that turns with the mean, as with adamw_nesterov. None: nesterov for adamw; last beside
    another optimizer, where it made no difference."""
    nesterov: bool = True
    """muon: look ahead along the momentum."""
    lookahead: float | None = None
    """muon, with nesterov: how many steps to look ahead. With more steps the newest gradient counts more. None: one."""
    newton_schulz_steps: int = 5
    """muon: iterations that make an update orthogonal."""
    newton_schulz_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """muon: dtype of these iterations. None: bfloat16 on a GPU, float32 on a CPU."""
    weight_decay: float = 0.1
    """Decoupled, multiplied by the learning rate. Error feedback never extrapolates it."""
    clip_norm: float = 1.0
    """The gradient of every parameter group is scaled down to this norm, taken over all stages. 0: no clipping."""
    sharded: bool = False
    """The replicas of a stage share its optimizer (ZeRO-1): each keeps masters and state of a part of the parameters,
    updates them, and sends them to the others."""
    error_feedback: float = 1.0
    """lam: how much of the one-step prediction to apply. 0 is plain delay. It has no effect on synchronous steps."""
    schedule: str = "cosine"
    """Schedule of the learning rate after a linear warm-up: constant, cosine, linear, wsd or 1-sqrt. The last
    two keep the peak until the last decay_steps. Then wsd falls linearly, and 1-sqrt falls with 1 - sqrt(share of the
    decay that has passed)."""
    horizon_steps: int | None = None
    """Steps for which warm-up and schedule are planned. Afterwards the rate stays constant. None: train.steps, so a
    resumed run with more steps changes its rate."""
    warmup_steps: int | None = None
    """Steps of the warm-up. None: a tenth of all steps, at most 1,000."""
    decay_steps: int | None = None
    """wsd and 1-sqrt: steps at the end in which the rate falls. None: a fifth of all steps."""
    final_fraction: float = 0.1
    """The rate at the end, as a share of the peak."""


@dataclass(frozen=True)
class AdapterSection:
    rank: int | None = None
    """Rank of LoRA adapters in the linear projections of the blocks (needs slipstream[adapters]). They are trained, and
    all other weights are frozen. None: no adapters."""
    alpha: float | None = None
    """The product of an adapter's two matrices is multiplied by alpha / rank. None: twice the rank."""
    targets: tuple[str, ...] = ()
    """Projections that get adapters. Of the decoder: query, key, value, output, gate, up and down. Of model.hf: the
    names that transformers has for them, such as q_proj. Empty: all."""


@dataclass(frozen=True)
class TrainSection:
    steps: int = 200
    """Updates to make."""
    microbatch_size: int = 4
    """Sequences in a microbatch."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the stages compute. auto: on GPUs if there are enough. Each stage that is a process needs its own GPU,
    unless pipeline.share_gpu is set."""
    dtype: Literal["float32", "float64"] = "float32"
    """Dtype of the masters, which the optimizer updates, and of the optimizer state."""
    compute_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """Dtype of the working copies of the weights, of activations and of messages. None: bfloat16 on a GPU if
    train.dtype is float32, otherwise train.dtype."""
    gradient_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """Dtype in which the gradients of a step's microbatches are added. None: train.dtype."""
    reduction_dtype: Literal["float64", "float32", "bfloat16"] | None = None
    """Dtype in which the gradients of replicas are added and sent. The gradients of tied weights are sent in it too.
    None: train.gradient_dtype."""
    non_finite: Literal["raise", "skip"] = "raise"
    """What an inf or nan in loss or gradient does: raise stops the run, skip leaves out one update, on all stages
    alike."""
    track_alignment: bool = True
    """Log the cosine between each update and what was expected of it. Without error feedback this keeps one more copy
    of the weights."""
    loss_chunk_tokens: int = 0
    """Head and loss process a microbatch in chunks of this many tokens, so only their logits exist at a time. 0: all at
    once."""
    recompute_every: int = 0
    """Every n-th block keeps only its input and is computed again in the backward. 1: all blocks. 0: none."""
    freeze: tuple[str, ...] = ()
    """Names of parameters that keep their initial values, with * and ?: embedding.*, block0.*, *norm.weight. They have
    no master, optimizer state or gradient."""
    compile: bool = False
    """Run the blocks through torch.compile, with one graph for all equal blocks. Fewer kernels, the same numbers up to
    rounding. The first microbatches wait for the compiler."""


@dataclass(frozen=True)
class EvaluationSection:
    every_steps: int = 50
    """Evaluate after this many steps. 0: only at the end. The pipeline does not drain for it."""
    batches: int = 8
    """Microbatches of held-out text. 0: no evaluation."""
    per_source: bool = False
    """Also report the loss of every entry of data.validation_sources, or of every source with a weight."""
    prompts: tuple[str, ...] = ()
    """Texts that the model continues at every evaluation, to read on the screen, in metrics.jsonl and in loggers. Every
    token costs one forward of all prompts through all stages, during which training waits."""
    sample_tokens: int = 32
    """Number of tokens with which each prompt is continued."""


@dataclass(frozen=True)
class CheckpointSection:
    every_steps: int = 0
    """Save after this many steps. 0: not by steps."""
    every_minutes: float = 30.0
    """Save after this many minutes. 0: not by time."""
    at_end: bool = True
    """Save after the last step. SIGTERM, SIGHUP (unless started with nohup) and Ctrl-C always save and stop the run
    within a few steps. SIGUSR1 always saves and does not stop it. A second Ctrl-C stops it at once."""
    keep_last: int = 2
    """How many of the newest checkpoints to keep."""
    keep_every: int = 0
    """Also keep the checkpoints of every so many steps. 0: none."""
    resume: bool = False
    """Resume from the newest complete checkpoint of the run. If there is none, start from the beginning."""


@dataclass(frozen=True)
class RunSection:
    name: str = "default"
    """The folder of the run below `folder`."""
    folder: str = "runs"
    """Where runs are kept."""
    overwrite: bool = False
    """Replace an earlier run of the same name."""
    sinks: tuple[str, ...] = ()
    """Loggers that receive the metrics in addition to metrics.jsonl: tensorboard, wandb and trackio (need
    slipstream[log]), or import paths of your own classes: see slipstream/observe/sinks.py."""
    log_every_steps: int = 10
    """How often a line is printed if there is no terminal for a progress bar."""
    trace_actions: int = 512
    """How many of the latest actions of every stage go into trace.json, at most 4,096."""
    profile_steps: str = ""
    """Steps that every stage records with torch's profiler: "20:23" records steps 20 to 23 and writes a Chrome trace to
    profile/stage-S.replica-R.json. Empty: none."""


@dataclass(frozen=True)
class Config:
    model: ModelSection = field(default_factory=ModelSection)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    train: TrainSection = field(default_factory=TrainSection)
    adapter: AdapterSection = field(default_factory=AdapterSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    run: RunSection = field(default_factory=RunSection)
