"""Tables and pictures of a bench result, from a made-up one; no GPU."""

import copy
import json

import pytest

from specgen import cli
from specgen.bench import pictures, report
from specgen.bench.output import read, write
from specgen.bench.results import contenders, line, medians, ratio
from specgen.bench.workloads import LENGTHS, MAIN, OF_HEADS, SHARES, parse, spell_geometry
from specgen.errors import SpecgenError

LLAMA = {
    "name": "global",
    "query_heads": 32,
    "kv_heads": 8,
    "qk_dim": 128,
    "v_dim": 128,
    "scale": 128**-0.5,
    "mask": "causal",
    "page_size": 16,
    "dtype": "bfloat16",
}
QWEN = LLAMA | {"query_heads": 14, "kv_heads": 2, "qk_dim": 64, "v_dim": 64}
RATES = {"empty_us": 4.0, "read_GBs": 4300.0, "copy_GBs": 4200.0, "matmul_TFLOPs": 715.0}
FACTORS = {"specgen": 1.08, "untuned_kernels": 1.3, "fa3": 1.2, "cudnn": 1.05, "vllm": 4.0}
PEERS = {
    "specgen": {"title": "llama_3_1_8b_kernels", "version": "0.1.0 (spec 0123456789ab)"},
    "untuned_kernels": {"title": "untuned_kernels", "version": "0.1.0 (spec 0123456789ab)"},
    "fa3": {"title": "FlashAttention-3", "version": "3.0.0"},
    "cudnn": {"title": "cuDNN (dense)", "version": "torch 2.11.0, cuDNN 91501"},
    "vllm": {"title": "vLLM Triton", "version": "file 0123456789ab"},
    "flashinfer": {"title": "FlashInfer", "reason": "flashinfer is not installed"},
}


def made_up(workloads=MAIN, layer=LLAMA):
    """Rows whose times are a factor of the floor, and 8 microseconds."""
    rows = []
    for workload in workloads:
        floor = workload.floor_us(layer, RATES["read_GBs"], RATES["matmul_TFLOPs"])
        dense = workload.uniform is not None
        names = [name for name in FACTORS if dense or name != "cudnn"]
        times = {name: round(FACTORS[name] * floor + 8, 3) for name in names}
        rows.append(
            {
                "workload": workload.name,
                "geometry": spell_geometry(layer),
                "bytes": workload.bytes(layer),
                "operations": workload.operations(layer),
                "rounds": 20,
                "floor_us": round(floor, 3),
                "times_us": times,
                "spread_us": {name: [time * 0.99, time * 1.02] for name, time in times.items()},
                "host_us": dict.fromkeys(times, 12.25) if workload.query_len == 1 else {},
                "error": dict.fromkeys(times, 2.1e-3),
                "ways": {"fa3": {"plain": times["fa3"] + 1, "metadata": times["fa3"]}},
                "notes": {} if dense else {"cudnn": "reads a dense cache: sequences of one length alone"},
                "rates": RATES,
            }
        )
    return rows


@pytest.fixture
def result():
    rows = made_up() + made_up(OF_HEADS[14, 2, 64], QWEN)
    return {
        "device": "Fake GPU",
        "software": {"driver": "580", "torch": "2.11.0"},
        "peers": PEERS,
        "command": "specgen bench llama_3_1_8b_kernels untuned_kernels",
        "track": "kernels",
        "rounds": 20,
        "seed": 0,
        **medians(rows),
        "rows": rows,
        "skipped": {"dec b1 k1m, 32/8": "too long"},
    }


def test_tables(result):
    text = report.markdown(result)
    lines = text.splitlines()
    assert lines[0] == "# Attention on Fake GPU" and lines[2] == f"`{result['command']}`"
    assert "driver 580, torch 2.11.0; 20 rounds. Measured beside the rows: reads 4300 GB/s" in text
    assert lines.count("## 32/8 heads of 128, bfloat16, pages of 16") == 1
    assert lines.count("## 14/2 heads of 64, bfloat16, pages of 16") == 1
    assert "| workload | floor | specgen | untuned_kernels | fa3 | cudnn | vllm | of floor |" in lines
    assert "| dec b32 k4k | 125.0 | 143.0 | 170.5 | 158.0 | **139.2** | 507.9 | 0.87 |" in lines
    assert "| pre b1 16k | 3076 | **3330** |" not in text and "| pre b1 16k | 3076 | 3330 | 4006 |" in text
    assert any(
        row.startswith("| dec b64 ragged k2k | 168.9 | **190.4** |") and "| - |" in row for row in lines
    )
    ratios = next(row for row in lines if row.startswith("| specgen / fa3 |"))
    assert ratios.count("(12)") == 1 and ratios.count("(9)") == 1, ratios
    head = next(row for row in lines if row.startswith("| ratio of times |"))
    assert head.count(" rows above 1.00 |") == 2
    assert (
        "| specgen / cudnn | 1.020 (10) | 1.028 (dec b128 k2k) | 10 | 1.025 (8) | 1.029 (pre b1 16k) | 8 |"
        in lines
    )
    best = "| specgen / the best of them | 1.001 (12) | 1.028 (dec b128 k2k) | 10 | 1.010 (9) | 1.029 (pre b1 16k) | 8 |"
    assert best in lines, "fa3 where cudnn is not"
    assert "| specgen / cudnn |" in text and "| specgen / specgen |" not in text
    assert "| fa3 | FlashAttention-3 | 3.0.0 | 2.1e-03 | 3.0 % | metadata (21) |" in lines
    assert "| dec b1 k512 | 12.2 | 12.2 | 12.2 | 12.2 | 12.2 |" in lines
    assert "- flashinfer: flashinfer is not installed" in lines
    assert "- skipped dec b1 k1m, 32/8: too long" in lines
    assert (
        "- cudnn (dec b64 ragged k2k, dec b1 k32k + b15 k512, mixed pre b1 2k + dec b32 k4k): "
        "reads a dense cache: sequences of one length alone"
    ) in lines
    for first, second in zip(lines, lines[1:]):
        if first.startswith("|") and second.startswith("|"):
            assert first.count("|") == second.count("|")


def test_a_report_of_fewer_rounds(result):
    result["rows"][3]["rounds"] = 7
    assert "torch 2.11.0; 7 to 20 rounds, as the time allowed. Measured" in report.markdown(result)
    for row in result["rows"]:
        del row["rounds"]  # as results of before have it
    assert "torch 2.11.0; 20 rounds. Measured" in report.markdown(result)


def test_the_regret_of_measured_trees(result):
    assert "## Regret" not in report.markdown(result | {"regret": {}})
    held_out = {"workloads": 39, "unmeasured": 1, "geometric_mean": 1.0229, "worst": 1.1864, "worst_workload": "dec b7 k500"}
    default = {"workloads": 900, "unmeasured": 0, "geometric_mean": 1.25, "worst": 8.5, "worst_workload": "pre b1 16"}
    tree = {"layer": "global", "arch": "sm_90", "measured_on": "h200", "held_out": held_out, "default": default}
    lines = report.markdown(result | {"regret": {"my_kernels": [tree]}}).splitlines()
    place = lines.index("## Regret")
    assert [line for line in lines[place:] if line.startswith("| my_kernels")] == [
        "| my_kernels, global, sm_90 | h200 | the tree's choice, on batches left out of its fit | 39 (1 more without a time) | 1.023 "
        "| 1.186 (dec b7 k500) |",
        "| my_kernels, global, sm_90 | h200 | the untuned choice, on those | 900 | 1.250 | 8.500 (pre b1 16) |",
    ]


def test_a_report_of_nothing(result):
    text = report.markdown(result | {"rows": [], "skipped": {}, "peers": {}})
    assert text.splitlines()[0] == "# Attention on Fake GPU" and "##" not in text


def test_end_to_end_report(result):
    rows = made_up([parse("dec b8 k4k")])
    rows[0]["times_us"]["rest"] = 5.0
    rows[0]["spread_us"]["rest"] = [4.9, 5.1]
    peers = PEERS | {"rest": {"title": "the step without attention"}}
    text = report.markdown(result | {"track": "end-to-end", "layers": 16, "rows": rows, "peers": peers})
    assert text.startswith("# One decode step of 16 layers on Fake GPU\n")
    assert "| 5.0 |" in text and "**5.0**" not in text and "specgen / rest" not in text


def test_numbers_of_rows(result):
    assert contenders(result) == ["specgen", "untuned_kernels", "fa3", "cudnn", "vllm"]
    row = result["rows"][0]
    assert ratio(row, "specgen", "fa3") == pytest.approx(row["times_us"]["specgen"] / row["times_us"]["fa3"])
    assert ratio(row, "specgen", "flex") is None
    assert line(row) == (
        "dec b1 k512 [32/8 heads of 128]                    floor      0.5  specgen 8.5 (0.06)  untuned_kernels 8.6 (0.06)  "
        "fa3 8.6 (0.06)  cudnn 8.5 (0.06)  vllm 10.0 (0.05)"
    )
    assert line(result["rows"][8]).endswith("  cudnn -")
    assert medians([{"rates": {"a": 1.0}}, {"rates": {"a": 5.0}}, {"rates": {"a": 2.0}}]) == {"a": 2.0}


def test_series_by_length(result):
    found = pictures.series(result)
    assert {same: list(rows) for (_, same), rows in found.items()} == {
        "decode, batch 1": [512, 4096, 32768, 131072],
        "first prefill, batch 1": [512, 2048, 8192, 16384],
    }
    found = pictures.series(result | {"rows": made_up(LENGTHS)})
    assert [len(rows) for rows in found.values()] == [7, 6]


def test_shares_of_decode(result):
    found = {workload.name: pictures.decode_share(workload) for workload in SHARES}
    assert sorted(set(found.values())) == [0, 0.5, 1] and found["mixed pre b4 2k + dec b4 k2k"] == 0.5
    assert pictures.decode_share(parse("chunk q2 of 9")) is None
    assert pictures.decode_share(parse("dec b64 ragged k2k")) is None
    assert pictures.shares(result) is None
    assert pictures.shares(result | {"rows": made_up(SHARES)}) is not None


def test_writing_and_reading_back(result, tmp_path):
    written = write(result | {"rows": result["rows"] + made_up(SHARES)}, tmp_path / "a")
    assert [path.name for path in written] == [
        "results.json",
        "README.md",
        "latency.png",
        "roofline.png",
        "ratios.png",
        "shares.png",
    ]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written[2:])
    assert "![ratios](ratios.png)" in (tmp_path / "a" / "README.md").read_text()
    arguments = ["bench", "--report", str(written[0]), "-o", str(tmp_path / "b")]
    assert cli.main(arguments) == 0
    for path in written:
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_without_a_subject_or_rows_nothing_is_drawn(result, tmp_path):
    rows = copy.deepcopy(result["rows"])
    for row in rows:
        row["times_us"].pop("specgen")
    assert pictures.ratios(result | {"rows": rows}) is None
    assert pictures.draw(result | {"rows": []}, tmp_path) == []


def test_what_is_no_result(tmp_path):
    file = tmp_path / "x.json"
    for text, message in (
        ("{", "x.json:1:2: not valid JSON: Expecting property name"),
        ("[" * 100_000, "x.json: not valid JSON: nested too deeply"),
        ("[]", "x.json: is no result of `specgen bench`: it lacks device, software"),
        (json.dumps({"device": "", "software": {}, "peers": {}, "track": ""}), "it lacks command, rows"),
    ):
        file.write_text(text)
        with pytest.raises(SpecgenError, match=message):
            read(file)
