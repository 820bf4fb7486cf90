"""Test the table of quality.py's results, on made-up ones."""

import json

import pytest
from pages import measurements, readme
from pages.quality_table import quality


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of one GPU's results."""
    monkeypatch.setattr(measurements, "RESULTS", tmp_path)
    monkeypatch.setattr(measurements, "committed", lambda path: path.name)
    (tmp_path / "made-up-gpu").mkdir()
    return tmp_path / "made-up-gpu"


def line(model: str, quantization: str, **more) -> str:
    return json.dumps(
        {
            "op": "quality",
            "case": f"{model} {quantization}",
            "shape": {"model": model, "quantization": quantization, "tokens": 4096},
            "gpu": "Made-up GPU",
            "perplexity": {"bf16": 5.25, "stock": 5.5, "ours": 5.50056},
            "greedy_tokens": 2048,
            "perplexity_off": 0.0001,
            "scale_errors": {"0.o_proj": 0.001, "1.o_proj": -0.00225},
            "tokens_equal": 2000,
            "wrong": [],
            "versions": {"torch": "2.11.0", "vllm": "0.33.0"},
            **more,
        }
    )


def test_the_newest_line_of_each_checkpoint_is_a_row(folder):
    assert quality() == "Nothing yet."
    (folder / "2026-11-21-a-quality.jsonl").write_text(line("llama", "static", tokens_equal=1) + "\n")
    wrong = line("deepseek", "dynamic", perplexity_off=0.004, wrong=["the perplexity"])
    (folder / "2026-11-22-b-quality.jsonl").write_text(line("llama", "static") + "\n" + wrong + "\n")
    text = quality()
    assert "**Made-up GPU**, torch 2.11.0, vllm 0.33.0" in text
    assert text.splitlines()[-2:] == [
        "| llama | FP8, per tensor, static | 5.2500 | 5.5000 | 5.5006 | +0.010% | -0.225% | 2000 of 2048 |",
        "| deepseek | FP8, per tensor, dynamic | 5.2500 | 5.5000 | 5.5006 | **+0.400%** | **-0.225%** | 2000 of 2048 |",
    ]


def test_the_page_of_benchmarks_has_the_table(folder):
    page = readme.DOCS / "benchmarks.md"
    assert "<!-- quality -->\nNothing yet.\n<!-- /quality -->" in readme.fresh(page)
    (folder / "2026-11-22-b-quality.jsonl").write_text(line("llama", "static") + "\n")
    assert "| llama | FP8, per tensor, static | 5.2500 |" in readme.fresh(page)


def test_a_side_that_did_not_run_has_no_difference(folder):
    found = json.loads(line("llama", "dynamic", perplexity={"bf16": 5.25, "ours": 5.5}))
    del found["perplexity_off"]
    (folder / "2026-11-22-b-quality.jsonl").write_text(json.dumps(found) + "\n")
    assert quality().splitlines()[-1] == (
        "| llama | FP8, per tensor, dynamic | 5.2500 | not runnable | 5.5000 |  |  |  |"
    )
