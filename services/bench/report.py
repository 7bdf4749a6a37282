"""What every benchmark writes: its figures and the environment they were measured in."""

import json
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table

RESAMPLES = 10_000


def environment() -> dict[str, Any]:
    """Where and on what a benchmark ran."""
    processor = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
        if Path("/proc/cpuinfo").is_file()
        else iter(()),
        platform.processor(),
    )
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write_json(file: Path, benchmark: str, settings: dict[str, Any], figures: dict[str, Any]) -> None:
    """Write what the benchmark's table shows, with its settings and the environment."""
    record = {"benchmark": benchmark, "environment": environment(), "settings": settings} | figures
    file.write_text(json.dumps(record, indent=1) + "\n")


def resampled(values: Sequence[float]) -> dict[str, float]:
    """Their mean, and the interval that 95 % of the means of resampled values lie in; always the same one."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return {
        "mean": statistics.fmean(values),
        "low": means[int(0.025 * RESAMPLES)],
        "high": means[int(0.975 * RESAMPLES)],
    }


def figures_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """A table of rows that have the same columns; texts stand left, numbers right."""
    table = Table(title=title, title_justify="left")
    for name, value in rows[0].items():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def _commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
