"""Runs an analysis, trace by trace, resumable at any moment: a row of results.jsonl a trace.

Each policy first decodes the traces' own tokens at each budget, teacher-forced, which gives its
eviction times; one dense pass a trace over the full cache then reads the attention layer by layer.
Traces are decoded in fixed units of `batch_size`; a unit whose rows are not all there is decoded
again as it was the first time, and only missing rows are appended.
"""

import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvpolicies import streams
from kvpolicies.eval.revisit.config import Revisit
from kvpolicies.eval.revisit.traces import TraceSource, encode, find
from kvpolicies.eval.study import asked, provenance
from kvpolicies.eval.study import locks as claims
from kvpolicies.eval.study.results import NAME as RESULTS
from kvpolicies.eval.study.results import open_whole
from kvpolicies.models import loading

Row = dict[str, Any]


def run(config: Revisit) -> tuple[Revisit, list[Row]]:
    """Analyses what is missing; returns the config as it was resolved and a row a trace.

    Raises:
        UserError: anything wrong with the input: before a model is loaded where it can be known by
            then, and before any trace is read in any case.
    """
    config.check()
    config, source = find(config)
    assert config.model is not None
    loading.check_name(config.model)
    loading.check_device(config.device)
    provenance.check_makeable(Path(config.out))
    claims.check_free(Path(config.out))
    return _run(config.resolved(), source)  # torch is imported from here on


def _run(config: Revisit, source: TraceSource) -> tuple[Revisit, list[Row]]:
    from kvpolicies.architecture import find_ropes
    from kvpolicies.eval.revisit.evictions import decode
    from kvpolicies.eval.revisit.rows import analyse, line_of, read_rows
    from kvpolicies.eval.revisit.setting import Setting, check

    assert config.model is not None
    provenance.check_folder(config, source.problems)
    read_rows(Path(config.out) / RESULTS)  # a broken line is found now
    model, tokenizer = loading.load(config.model, config.dtype, config.device)
    traces, told = encode(config, source, tokenizer)
    analysis = Setting(config, model, tokenizer, find_ropes(model))
    check(analysis, traces)
    for sentence in asked.cautions(told):
        streams.say(sentence)
    described = provenance.describe_model(model)
    provenance.open_folder(config, source.problems, described, told)
    folder = Path(config.out)
    often = 0.2 if sys.stderr.isatty() else 20.0
    with (
        claims.alone(folder),
        open_whole(folder / RESULTS) as file,
        tqdm(
            total=len(traces) * (len(analysis.cells) + 1), desc="traces", mininterval=often
        ) as bar,
    ):
        rows = {row["id"]: row for row in read_rows(folder / RESULTS)}
        for begin in range(0, len(traces), config.batch_size):
            unit = traces[begin : begin + config.batch_size]
            missing = [trace for trace in unit if trace.id not in rows]
            evictions = decode(analysis, unit, begin, bar.update) if missing else {}
            for trace in missing:
                pictured = trace is traces[0]
                rows[trace.id] = row = analyse(analysis, trace, evictions[trace.id], pictured)
                file.write(line_of(row))
                file.flush()
                bar.update()
            bar.update((begin + len(unit)) * (len(analysis.cells) + 1) - bar.n)
    return config, [rows[trace.id] for trace in traces]
