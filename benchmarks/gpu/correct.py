"""Whether the CUDA runner computes what it should, on the card: logits, streams, sampling, failing rows. JSON.

usage: PYTHONPATH=src python benchmarks/gpu/correct.py [--families llama,...] [--only logits,...] [--json PATH]
Random small models of real shapes are saved by transformers and loaded by us. Tolerance: both run in bfloat16 and are
compared with the float32 model; ours may be 1.5 times as far from it as transformers is, in the mean and at most.
Free KV memory holds NaN throughout. `--device cpu --quick` proves the checks over the kernels' plain reference.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from card_rig import FAMILIES, Family, make_family
from correct_logits import check_exact_bits, check_fp8, check_logits
from correct_rows import check_failing, check_prompt_scores, check_sampling, look_at_bits, look_at_products
from correct_streams import check_exact, check_streams

SECTIONS = ("logits", "fp8", "streams", "exact", "sampling", "failing", "bits")


def run_sections(family: Family, device: torch.device, only: set[str], *, quick: bool) -> list[dict[str, Any]]:
    sections: dict[str, list[Callable[[], list[dict[str, Any]]]]] = {
        "logits": [
            lambda: check_logits(family, device, quick=quick),
            lambda: check_logits(family, device, quick=quick, clustered=True) if _may_cluster(device) else [],
        ],
        "fp8": [] if family.checkpoint.shape.experts else [lambda: check_fp8(family, device, quick=quick)],
        "streams": [lambda: check_streams(family, device, quick=quick)],
        "exact": [
            lambda: check_logits(family, device, quick=quick, exact=True),
            lambda: check_exact(family, device, quick=quick),
            # The reference on a CPU is not row-exact.
            lambda: check_exact_bits(family, device, quick=quick) if device.type == "cuda" else [],
        ],
        "sampling": [
            lambda: check_sampling(family, device, quick=quick),
            lambda: check_prompt_scores(family, device),
        ],
        "failing": [] if family.checkpoint.shape.tied_embeddings else [lambda: check_failing(family, device)],
        "bits": [lambda: look_at_bits(family, device)] if device.type == "cuda" else [],
    }
    rows: list[dict[str, Any]] = []
    for name in SECTIONS:
        for check in sections[name] if name in only else []:
            since_s = time.perf_counter()
            try:
                found = check()
            except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
                found = [{"check": f"{family.name}: {name}", "ok": False, "error": f"{type(error).__name__}: {error}"}]
            for row in found:
                print(json.dumps(row), flush=True)
            print(f"  {time.perf_counter() - since_s:.1f} s", flush=True)
            rows += found
    return rows


def _may_cluster(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    from headrace.runner.cuda.kernels.clusters import can_cluster

    return can_cluster(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    device = torch.device(options.device)
    only = set(options.only.split(","))
    report: dict[str, Any] = {
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "none",
        "torch": torch.__version__,
        "tolerance": "1.5 times the distance of transformers' bfloat16 from float32, root mean square and maximum",
        "rows": [],
    }
    for name in options.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            family = make_family(name, Path(folder), device)
            report["rows"] += run_sections(family, device, only, quick=options.quick)
            family.checkpoint.close()
        if options.json:
            Path(options.json).write_text(json.dumps(report, indent=1))
    if "bits" in only and device.type == "cuda":
        report["rows"] += look_at_products(device)
    failed = [row["check"] for row in report["rows"] if not row.get("ok", True)]
    checked = sum("ok" in row for row in report["rows"])
    print(f"{checked - len(failed)} of {checked} checks hold" + "".join(f"\nFAILED {name}" for name in failed))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
