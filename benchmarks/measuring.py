"""What measuring costs beside `torch.testing.assert_close` and beside reading the two tensors: ratios of one run.

python -m benchmarks.measuring [--smoke]

Reading is the fastest of sum, max and amax over both tensors. `assert_close` gets a pair that passes: a failing one
also writes a message. One thread, in its own CPU time, so that what else runs counts little; the three take
turns, and a ratio is the median over the turns.
"""

import statistics
import time

import torch

from benchmarks.smoke import parser
from spcheck.worker.measure import measure

SIZES = {(17, 96): (15, 300), (512, 1024): (15, 4), (4096, 7168): (5, 1)}  # turns, and calls in one turn
SMOKE = {(17, 96): (1, 1), (65, 33): (1, 1)}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
KINDS = ("equal", "rounding", "wrong row")
BOUND = 0.05
FASTER, READING = 30, 1 / 4


def pair(kind, shape, dtype):
    """Values, and others that are equal, or off by a few ulps in most elements, or wrong in one row."""
    expected = torch.randn(shape).to(dtype)
    actual = expected.clone()
    if kind == "rounding":
        actual *= 1 + torch.randint(-3, 4, shape).to(dtype) * torch.finfo(dtype).eps
    if kind == "wrong row":
        actual[shape[0] // 2] *= 2
    return expected, actual


def seconds(call, calls):
    start = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - start) / calls


def passing(kind, expected, actual):
    return (expected, expected.clone()) if kind == "wrong row" else (expected, actual)


def fastest_reading(tensors, calls):
    ways = [torch.sum, torch.amax, torch.max]
    return min(ways, key=lambda way: min(seconds(lambda: [way(x) for x in tensors], calls) for _ in range(3)))


def ratios(kind, shape, dtype, turns, calls):
    """(measure over assert_close in speed, measure over reading in speed, seconds of measure, fastest reading)"""
    expected, actual = pair(kind, shape, dtype)
    close = passing(kind, expected, actual)
    read = fastest_reading((expected, actual), calls)
    taken = [
        (
            seconds(lambda: measure(expected, actual, BOUND), calls),
            seconds(lambda: torch.testing.assert_close(*close, rtol=BOUND, atol=BOUND), calls),
            seconds(lambda: [read(x) for x in (expected, actual)], calls),
        )
        for _ in range(turns)
    ]
    own = statistics.median(t[0] for t in taken)
    return statistics.median(t[1] / t[0] for t in taken), statistics.median(t[2] / t[0] for t in taken), own, read


def line(kind, shape, dtype, turns, calls):
    faster, reading, own, read = ratios(kind, shape, dtype, turns, calls)
    met = (
        "both"
        if faster >= FASTER and reading >= READING
        else ", ".join(
            name for name, held in (("assert_close", faster >= FASTER), ("reading", reading >= READING)) if held
        )
    )
    name = f"{list(shape)!s:13}{str(dtype).removeprefix('torch.'):9} {kind:10}"
    return f"{name}{faster:14.1f} x{reading:10.2f} x ({read.__name__:4}){own * 1e6:12.0f}   {met or 'neither'}"


def main():
    sizes = SMOKE if parser(__doc__).parse_args().smoke else SIZES
    torch.set_num_threads(1)
    print(f"{'':33}{'assert_close':>15}{'reading':>18}{'microseconds':>13}   targets met ({FASTER} x, {READING} x)")
    with torch.inference_mode():
        for shape, times in sizes.items():
            for dtype in DTYPES:
                for kind in KINDS:
                    print(line(kind, shape, dtype, *times), flush=True)


if __name__ == "__main__":
    main()
