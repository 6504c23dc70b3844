"""What spcheck costs, as ratios measured side by side in one run: this machine's speed cancels out.

python benchmarks/ratios.py
"""

import statistics
import subprocess
import sys
import time

import torch

from spcheck.case import Case
from spcheck.launch.ranks import run_threads
from spcheck.plan import make_plan

ROUNDS = 5
DIFF = [sys.executable, "-m", "spcheck.cli", "diff", "--tp", "2", "--tokens", "17", "--backend"]


def seconds(command):
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def ratio(command, base):
    """Median of the ratio pair by pair."""
    return statistics.median(seconds(command) / seconds(base) for _ in range(ROUNDS))


def warm_cases_per_second(**options):
    plan = make_plan(Case(**{"requests": (17,), "tp": 2, "backend": "loopback", **options}))
    run_threads(plan)
    start = time.perf_counter()
    for _ in range(2 * ROUNDS):
        run_threads(plan)
    return 2 * ROUNDS / (time.perf_counter() - start)


def main():
    torch.set_num_threads(1)
    import_torch = [sys.executable, "-c", "import torch"]
    import_click = [sys.executable, "-c", "import click"]
    help_page = [sys.executable, "-m", "spcheck.cli", "--help"]
    print(f"spcheck diff, cold, gloo       {ratio([*DIFF, 'gloo'], import_torch):5.2f} x `import torch`")
    print(f"spcheck diff, cold, loopback   {ratio([*DIFF, 'loopback'], import_torch):5.2f} x `import torch`")
    print(f"spcheck --help                 {ratio(help_page, import_click):5.2f} x `import click`")
    print(f"warm case, loopback, full-sp   {warm_cases_per_second():5.1f} a second")
    print(f"warm case, loopback, tp        {warm_cases_per_second(scheme='tp'):5.1f} a second")


if __name__ == "__main__":
    main()
