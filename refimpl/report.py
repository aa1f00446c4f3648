"""How results of `verify` are shown and stored.

Defines `table` for a terminal, and `write_reports` for machines: JSON and JUnit XML.
"""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from rich import box
from rich.table import Table

from refimpl.errors import SpecError
from refimpl.mask import AttentionMask
from refimpl.metadata import StepMetadata
from refimpl.partition import Policy
from refimpl.tolerance import OUTPUTS
from refimpl.verify import CaseResult, Plan


def mask_name(mask: AttentionMask) -> str:
    """A mask in a word or two: causal, causal window 16,0, full, window 16,8."""
    if mask.left < 0 and (mask.causal or mask.right < 0):
        return "causal" if mask.causal else "full"
    return f"{'causal ' if mask.causal else ''}window {mask.left},{mask.right}"


def table(results: Sequence[CaseResult], policy: Policy) -> Table:
    """The results of one policy, a line for each mask and dtype: the worst over head layouts and paddings."""
    shown = Table(title=str(policy), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in ("mask", "dtype"):
        shown.add_column(heading, no_wrap=True)
    for heading in (*OUTPUTS, "rows", "steps", "K/V bytes", "needed", "max/mean"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    groups: dict[tuple[str, str], list[CaseResult]] = {}
    for result in results:
        if result.case.policy == policy:
            groups.setdefault((mask_name(result.case.mask), result.case.dtype), []).append(result)
    for (mask, dtype), group in groups.items():
        wrong = sum(not result.agrees for result in group)
        shown.add_row(
            mask,
            dtype,
            *(f"{max(result.errors[name] for result in group):.0e}" for name in OUTPUTS),
            str(max(result.rows for result in group)),
            str(max(result.steps for result in group)),
            _size(max(result.kv_bytes_gathered for result in group)),
            _size(max(result.kv_bytes_needed for result in group)),
            f"{max(result.balance for result in group):.3f}",
            f"[red]{wrong} of {len(group)} differ[/red]" if wrong else f"[green]{len(group)} agree[/green]",
        )
    return shown


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def as_json(results: Sequence[CaseResult], plan: Plan, cp_size: int) -> str:
    """Everything that was found, case by case, with the plan and the versions that it was found with."""
    return json.dumps(
        {
            "command": "thdcp verify",
            "agrees": all(result.agrees for result in results),
            "cp_size": cp_size,
            "plan": asdict(plan),
            "versions": {
                "thdcp": metadata.version("thdcp"),
                "python": platform.python_version(),
                "numpy": np.__version__,
            },
            "cases": [{**_plain(result), "agrees": result.agrees} for result in results],
        },
        indent=1,
        allow_nan=False,
    )


def _plain(result: CaseResult) -> dict[str, object]:
    """A result as JSON can hold it, which knows no infinity."""
    errors = {name: error if np.isfinite(error) else "inf" for name, error in result.errors.items()}
    return {**asdict(result), "errors": errors}


def as_junit(results: Sequence[CaseResult]) -> bytes:
    """One JUnit test case a case, for the report pages of continuous integration."""
    failures = sum(not result.agrees for result in results)
    suite = ElementTree.Element("testsuite", name="thdcp verify", tests=str(len(results)), failures=str(failures))
    for result in results:
        case = result.case
        heads = f"{case.heads[0]}:{case.heads[1]}"
        name = f"{mask_name(case.mask)} heads {heads} {case.padding} {case.dtype}"
        element = ElementTree.SubElement(suite, "testcase", classname=f"thdcp.verify.{case.policy}", name=name)
        if not result.agrees:
            what = ", ".join(
                f"{output} {result.errors[output]:.3e} > {result.bounds[output]:.3e}"
                for output in OUTPUTS
                if not result.errors[output] <= result.bounds[output]
            )
            message = what or f"{result.poisoned} padding rows are not clean"
            ElementTree.SubElement(element, "failure", message=message).text = result.first_wrong
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def write_reports(folder: Path, results: Sequence[CaseResult], plan: Plan, cp_size: int) -> None:
    """Write verify.json and verify.xml into `folder`, each whole or not at all."""
    _write(folder / "verify.json", as_json(results, plan, cp_size).encode())
    _write(folder / "verify.xml", as_junit(results))


def prepare_folder(folder: Path) -> None:
    """Make the report folder before anything is computed; SpecError `usage` if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SpecError("usage", f"--report {folder}: {error.strerror or error}") from error


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def step_as_dict(step: StepMetadata) -> dict[str, object]:
    """A step in plain lists and integers, for JSON."""
    plain = {field.name: getattr(step, field.name) for field in fields(step)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in plain.items()}
