"""What a benchmark prints."""

from torchmars.benchmark.findings import MeasuredConfig, bench_results, bench_table, ratios
from torchmars.benchmark.measure import Measurement

MACHINE = {"device": "cpu", "cores": 2}


def measured(name, *rates, mfu=None, **phases_ms):
    found = [Measurement(rate, mfu, 1e5 / rate, phases_ms, 0.5) for rate in rates]
    return MeasuredConfig(name, "tiny.toml", 2, "random tokens", found)


def test_one_config():
    assert bench_table([measured("", 1000.0, mfu=0.51, other=10.0, data=90.0)]) == [
        "tokens/s                          1,000",
        "mfu                               51.0%",
        "step, ms                          100.0",
        "  data                      90.0 ( 90%)",
        "  other                     10.0 ( 10%)",
        "peak memory of rank 0, GiB         0.50",
    ]


def test_two_configs_round_by_round():
    one = measured("A", 900.0, 1000.0, 1200.0, forward=40.0)
    two = measured("B", 1000.0, 800.0, 1000.0, pipeline=50.0)
    lines = bench_table([one, two])
    assert lines[0].split() == ["A", "B"]
    assert lines[1].split() == "tokens/s 1,000 (900 to 1,200) 1,000 (800 to 1,000)".split()
    assert lines[4].split() == "forward 40.0 ( 40%) -".split()
    assert lines[5].split() == "pipeline - 50.0 ( 50%)".split()
    # A to B in each round: 0.9, 1.25, 1.2.
    assert ratios(one, two).describe(".3f") == "1.200 (0.900 to 1.250)"
    found = bench_results([one, two], MACHINE, 10, 20)
    assert found["ratio"] == {"median": 1.2, "lowest": 0.9, "highest": 1.25}
    assert found["machine"] == MACHINE and found["configs"][1]["rounds"][1]["mfu"] is None
    assert "ratio" not in bench_results([one], MACHINE, 10, 20)
