"""Writes the page of a tuning: what was chosen, why, what to expect of it, and how certain that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from ...config.schema import Config
from .advice import Size
from .figures import figures
from .fit import Fit
from .predict import Prediction
from .trials import Trials
from .trunks import Record, sentence

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1180px; margin: 2em auto;
       padding: 0 1.2em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; } td, th { padding: 0.25em 0.9em 0.25em 0; text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid #ccc; } td.n, th.n { text-align: right; white-space: nowrap; }
.cards { display: flex; flex-wrap: wrap; gap: 0.8em; } .card { border: 1px solid #ddd; border-radius: 6px;
       padding: 0.6em 1em; min-width: 9em; } .card b { display: block; font-size: 1.35em; } .card small { color: #555; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1em; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; } pre { background: #f5f5f5;
       padding: 0.8em; overflow-x: auto; }
"""


@dataclass(frozen=True)
class Tuning:
    """The result of a tuning at any level."""

    name: str
    config: Config
    """Configuration to train with."""
    batch: int
    """Tokens in a step of it."""
    size: Size
    tokens: float
    laws: list[dict[str, Any]]
    """What every published law says (law_rows)."""
    remarks: list[str]
    prediction: Prediction | None
    fit: Fit | None
    records: list[Record]
    budget: float
    trials: Trials | None

    @property
    def flops(self) -> float:
        return self.size.flops_per_token * self.tokens

    @property
    def spent(self) -> float:
        return sum(record.flops for record in self.records) if self.budget else 0.0

    def tree(self) -> dict[str, object]:
        section, train = self.config.optimizer, self.config.train
        return {
            "target": {
                "name": self.name,
                "optimizer": self.config.optimizer.name,
                "parameters": self.size.parameters,
                "tokens": self.tokens,
                "flops": self.flops,
            },
            "setting": {
                "learning_rate": section.learning_rate,
                "adamw_learning_rate": section.adamw_learning_rate,
                "weight_decay": section.weight_decay,
                "batch": self.batch,
                "microbatch_size": train.microbatch_size,
                "microbatches": self.config.pipeline.microbatches,
                "steps": train.steps,
                "warmup_steps": section.warmup_steps,
                "decay_steps": section.decay_steps,
            },
            "laws": self.laws,
            "remarks": self.remarks,
            "prediction": self.prediction and asdict(self.prediction),
            "fit": self.fit and self.fit.tree(),
            "trunks": [vars(record) for record in self.records],
            "trials": self.trials and [vars(record) for record in self.trials.records],
            "spent_flops": self.spent,
        }


def summary(tuning: Tuning) -> list[tuple[str, str, str]]:
    """Returns (what, value, detail) of the setting."""
    section, train, prediction = tuning.config.optimizer, tuning.config.train, tuning.prediction
    replicas = tuning.config.pipeline.replicas
    plural = "" if train.microbatch_size == 1 else "s"
    split = f"{train.microbatch_size} sequence{plural} x {tuning.config.pipeline.microbatches} microbatches"
    source = _band(prediction.rate_band) if prediction else "Step Law"
    if tuning.trials:
        source = f"trials, {_band(tuning.trials.band)}"
    rows = [
        ("learning rate", f"{section.learning_rate:g}", source),
        ("batch", f"{tuning.batch:,} tokens", split + (f" x {replicas} replicas" if replicas > 1 else "")),
        ("steps", f"{train.steps:,}", f"warm-up {section.warmup_steps:,}, decay {section.decay_steps:,} (1-sqrt)"),
        ("weight decay", f"{section.weight_decay:g}", "Power Lines"),
    ]
    if section.adamw_learning_rate is not None:
        rows.insert(1, ("rate of AdamW", f"{section.adamw_learning_rate:g}", "embedding, head, norms"))
    if prediction:
        rows.append(("final loss", f"{prediction.loss:.4f}", f"{_band(prediction.loss_band, '.4f')}, nats per token"))
        if prediction.gap:
            rows.append(("of it by the delay", f"{prediction.gap:.4f}", _band(prediction.gap_band, ".4f")))
    return rows


def advice_on_synchronous(tuning: Tuning) -> str:
    """Returns the sentence that compares the delayed pipeline with a synchronous one in the same time."""
    prediction, section = tuning.prediction, tuning.config.pipeline
    if prediction is None or not prediction.gap:
        return ""
    stages, microbatches = section.stages, section.microbatches
    better = "better" if prediction.synchronous_loss < prediction.loss else "worse"
    text = (
        f"A synchronous pipeline of {stages} stages and {microbatches} microbatches takes "
        f"{microbatches + stages - 1} / {microbatches} times as long for a step. In the time of this run it makes "
        f"{prediction.synchronous_tokens:.3g} tokens and ends at {prediction.synchronous_loss:.4f}, which is {better}."
    )
    if prediction.synchronous_batch is None:
        return f"{text} No larger batch, up to 64 times this one, changes that."
    if better == "better":
        return f"{text} Choose pipeline.schedule = 'one_f_one_b'."
    return f"{text} From about {prediction.synchronous_batch:,.0f} tokens in a step on, choose it."


def _band(band: Sequence[float], form: str = ".3g") -> str:
    return f"{band[0]:{form}} to {band[1]:{form}}"


def page(tuning: Tuning) -> str:
    parts = [
        f"<h1>{escape(tuning.name)}: {tuning.size.parameters:.3g} parameters on {tuning.tokens:.3g} tokens</h1>",
        "<p>Parameters without embedding and head; with experts, those that a token uses.</p>",
        '<div class="cards">',
        *(
            f'<div class="card">{escape(what)}<b>{escape(value)}</b><small>{escape(detail)}</small></div>'
            for what, value, detail in summary(tuning)
        ),
        "</div>",
        "<p><code>slipstream train tuned.toml</code> trains with it.</p>",
    ]
    if tuning.remarks:
        parts += ["<h2>To know</h2><ul>", *(f"<li>{escape(remark)}</li>" for remark in tuning.remarks), "</ul>"]
    if tuning.fit and tuning.prediction:
        parts += _prediction(tuning, tuning.fit, tuning.prediction)
    if tuning.trials:
        parts += ["<h2>Trials</h2>", *_sentences(tuning.trials.records)]
    parts += ["<h2>Published laws</h2>", _laws(tuning)]
    if tuning.fit:
        parts += _fit(tuning, tuning.fit)
    title = escape(f"tune {tuning.name}")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _prediction(tuning: Tuning, fit: Fit, prediction: Prediction) -> list[str]:
    wrong = [[what, f"{added:+.4f}", f"{added / prediction.loss:+.2%}"] for what, added in prediction.wrong.items()]
    parts = ["<h2>If a value is wrong by a factor of two</h2>", _table(["what", "loss", "share"], wrong)]
    if sentence_ := advice_on_synchronous(tuning):
        parts += ["<h2>Delayed or synchronous</h2>", f"<p>{escape(sentence_)}</p>"]
    if tuning.budget:
        seconds = sum(record.seconds for record in tuning.records)
        parts += [
            "<h2>Cost</h2>",
            f"<p>{len(tuning.records)} trunks, {tuning.spent:.3g} FLOPs in {seconds:,.0f} s: "
            f"{tuning.spent / tuning.flops:.2%} of the target's {tuning.flops:.3g} (budget {tuning.budget:.2%}).</p>",
        ]
    total = tuning.tokens + prediction.equivalent_tokens
    drawn = figures(fit, prediction, tuning.records, tuning.size.parameters, total)
    if not drawn:
        return [*parts, "<p>No figures: they need <code>pip install slipstream[plot]</code>.</p>"]
    shown = [f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>" for title, svg in drawn.items()]
    return [*parts, '<h2>The fit</h2><div class="figures">', *shown, "</div>"]


def _laws(tuning: Tuning) -> str:
    rows = []
    for row in tuning.laws:
        rate, converted = ("" if row[name] is None else f"{row[name]:.3g}" for name in ("rate", "converted"))
        law = f"{row['name']}, {row['source']}"
        rows.append([law, rate, converted, f"{row['batch']:,.0f}", row["formula"], row["fitted_on"]])
    optimizer = tuning.config.optimizer.name.rpartition(".")[2]
    return _table(["law", "rate of AdamW", f"as {optimizer}", "batch", "formula", "fitted on"], rows)


def _fit(tuning: Tuning, fit: Fit) -> list[str]:
    rows = [
        [
            prior.name,
            f"{fit.theta[index]:.4g}",
            _band(fit.band(fit.samples[:, index])),
            f"{prior.mean:.4g} ± {prior.spread:g}",
            prior.reason,
        ]
        for index, prior in enumerate(fit.priors)
    ]
    centre = fit.centre
    return [
        "<h2>The law</h2>",
        "<pre>L = E + R + R/R0 (2k (lr/lr* - 1 - ln(lr/lr*)) + w (ln B - ln B*)^2) + gap\n"
        "R = A n^-alpha + C d^-beta\n"
        "ln lr* = r + r_n ln n + r_d ln d + r_b ln b     ln B* = b + b_d ln d     gap = g (d / b)^-g_s n^g_n</pre>",
        f"<p>n, d and b are parameters, tokens and batch divided by {centre.parameters:.3g}, {centre.tokens:.3g} and "
        f"{centre.batch:.3g}; B* is in units of the last, too. R0 is R at n = d = 1. The residuals are "
        f"{fit.noise:.2%} of the loss. Bands are 5 to 95 %.</p>",
        _table(["", "value", "band", "prior", "from"], rows),
        "<h2>Trunks</h2>",
        *_sentences(tuning.records),
    ]


def _sentences(records: Sequence[Record]) -> list[str]:
    return ["<ul>", *(f"<li>{escape(sentence(record))}</li>" for record in records), "</ul>"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table. Its second to fourth column are numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        made = (f"<{tag}{' class=n' if 1 <= i <= 3 else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
