"""Collect the numbers of the documentation's figures from results and predictions."""

import pathlib

import decode_profile
import figures
import latency_report
from timing_study import calibrate, report, step

from . import attention_table, measurements, step_table
from .measurements import RESULTS

PEAK_GB_S = {"NVIDIA H100 80GB HBM3": 3350.0, "NVIDIA H200": 4800.0}
"""HBM bandwidth by GPU, of NVIDIA's data sheets."""
PREDICTED = "MI300X"
ATTENTION_BATCHES = (1, 8, 64)
PROFILED = ("llama-3.1-405b-fp8", "deepseek-v3")


def speedups() -> str:
    """Return the measured speedups of the models in `PROFILED`, beside the predicted ones. README's table has all models."""
    cases = [case for case in measurements.whole_models()[1] if case.model.partition(",")[0] in PROFILED]
    measured = {
        f"{measurements.named(case)}, {case.gpus}": {
            batch: (latency_report.speedup(run.sides), *latency_report.speedup_spread(run.sides))
            for batch, run in case.runs.items()
        }
        for case in cases
    }
    predicted = {}
    for model, name in step_table.MODELS.items():
        points = {}
        for batch in step_table.BATCHES:
            baseline, plugin = (step_table.total(PREDICTED, model, side, batch) for side in step.SIDES)
            low = (baseline.us - baseline.bound_us) / (plugin.us + plugin.bound_us)
            high = (baseline.us + baseline.bound_us) / (plugin.us - plugin.bound_us)
            points[batch] = baseline.us / plugin.us, low, high
        predicted[f"{name}, TP8, {PREDICTED}: predicted (bars: error band of the kernels that have one)"] = points
    return figures.speedups(measured, predicted, PREDICTED)


def predicted_steps() -> str:
    """Return both sides' predicted steps, with the band of a step."""
    models, floors = {}, {}
    for model in step_table.MODELS:
        totals_of = {
            side: {batch: step_table.total(PREDICTED, model, side, batch) for batch in step_table.BATCHES}
            for side in step.SIDES
        }
        name = f"{model}, TP {step_table.RANKS}"
        models[name] = {
            side: {batch: (total.us / 1e3, *step_table.step_report.interval(total)) for batch, total in totals.items()}
            for side, totals in totals_of.items()
        }
        floors[name] = {batch: total.floor_us / 1e3 for batch, total in totals_of["plugin"].items()}
    return figures.predicted_steps(models, floors, PREDICTED)


def breakdown() -> str:
    """Return the profiled steps of each model's run with most batch sizes."""

    def step_ms(ranks: list[dict]) -> figures.Step:
        classes = decode_profile.by_class(ranks[0])
        return {kind: us / 1e3 for kind, us in classes.items()}, ranks[0]["span_us"] / 1e3

    models, runs = {}, measurements.grouped(measurements.profiled_runs(), lambda run: run.model)
    for model in PROFILED:
        run = max(runs[model], key=lambda run: len(run.batches))
        models[f"{run.name.partition(', no')[0]}, {run.layers} layers, {run.hardware}"] = {
            batch: {side: step_ms(ranks) for side, ranks in sides.items()} for batch, sides in run.batches.items()
        }
    return figures.breakdown(models)


def attention() -> str:
    """Return decode attention of one TP8 rank as a share of the HBM roofline."""
    lines = [
        line
        for newest in measurements.measured(attention_table.DECODE)
        for line, _ in newest.values()
        if line["shape"]["batch"] in ATTENTION_BATCHES and not line["case"].endswith(" ragged")
    ]
    [gpu] = {line["gpu"] for line in lines}
    models = {}
    for name, of_model in attention_table.by_model(lines).items():
        if name.endswith(" tp8"):
            curves: figures.Curves = {}
            for line in of_model:
                share = line["bandwidth_gb_s"] / PEAK_GB_S[gpu]
                shares = {"plugin": share, "baseline": share / measurements.ratio(line)}
                for side, value in shares.items():
                    curves.setdefault((side, line["shape"]["batch"]), {})[line["shape"]["context"]] = value
            models[f"{name}: {'MLA' if of_model[0]['op'] == 'mla_decode' else 'GQA'}, one layer"] = curves
    return figures.roofline(models, f"Decode attention on {gpu}, measured: share of {PEAK_GB_S[gpu] / 1e3:g} TB/s")


def accuracy() -> str:
    """Return the calibration's points, with the error band of kernels that stream weights."""
    calibration = calibrate.read()
    cases = measurements.grouped((report.Case(*row) for row in calibration["points"]), lambda case: case.kind)
    points = {
        kind: [(case.us, case.predicted, case.half != report.HALVES[0]) for case in alike]
        for kind, alike in cases.items()
    }
    title = "Predicted against published times of decode kernels, MI300X"
    band = max(half["largest"] for half in calibration["classes"]["skinny GEMM"].values())
    return figures.accuracy(points, title, band)


FIGURES = {
    "speedup": speedups,
    "step_breakdown": breakdown,
    "decode_attention": attention,
    "predicted_steps": predicted_steps,
    "prediction_accuracy": accuracy,
}


def drawn() -> dict[pathlib.Path, str]:
    """Return the SVG text of every figure by its path."""
    return {RESULTS / f"{name}.svg": draw() for name, draw in FIGURES.items()}
