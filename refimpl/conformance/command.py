"""The command `thdcp check`: options in, verdicts out. No semantics live here.

Like every command of `cli` it checks its options and returns the work to do.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from refimpl.collectives import MpiCollectives, launched, say
from refimpl.conformance import check as checking
from refimpl.conformance import vectors
from refimpl.conformance.adapters import Adapter, check_spec, load
from refimpl.conformance.cases import Vector
from refimpl.conformance.check import Checked, Result
from refimpl.conformance.declaration import DTYPES, Declaration
from refimpl.conformance.export import export as export_cases
from refimpl.conformance.hint import diagnosed
from refimpl.conformance.patience import DEFAULT_TIMEOUT
from refimpl.conformance.ranks import GRACE_SECONDS, load_on_ranks, run_adapter_on_ranks
from refimpl.conformance.report import show, write_reports
from refimpl.conformance.selection import read_known, select
from refimpl.errors import SpecError
from refimpl.report import prepare_folder

Work = Callable[[MpiCollectives | None], int]
Progressing = Callable[[Result], None]

NOT_CONFORMING = 1
UNUSABLE = 2
WIDTH = 140
FOREVER = 1e9


@click.command()
@click.argument("paths", nargs=-1, metavar="[RESULTS]", type=click.Path(path_type=Path))
@click.option("--adapter", metavar="MODULE:CALLABLE", help="Ask a Python implementation; under mpirun, on its ranks.")
@click.option("--list", "list_cases", is_flag=True, help="List the cases.")
@click.option(
    "--export", "export_to", type=click.Path(path_type=Path), metavar="DIR", help="Write the cases, without answers."
)
@click.option(
    "--capture",
    "captured",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE...",
    help="Judge tensors dumped from a real step, in one file or several, such as one a rank.",
)
@click.option("--full", is_flag=True, help="With --capture: every row, not a sample.")
@click.option(
    "--known", type=click.Path(path_type=Path), metavar="FILE", help="Ids of cases that must fail, a line each."
)
@click.option("--only", multiple=True, metavar="PATTERN", help="Cases whose id matches, such as 'partition-*'.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Judge by this precision instead of the declared one.")
@click.option("--report", type=click.Path(path_type=Path), metavar="DIR", help="Folder for check.json, .xml, .html.")
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=DEFAULT_TIMEOUT,
    show_default=True,
    help="Seconds for an adapter's answer to one case; 0: no limit.",
)
def check(
    paths: tuple[Path, ...],
    adapter: str | None,
    list_cases: bool,
    export_to: Path | None,
    captured: tuple[Path, ...],
    full: bool,
    known: Path | None,
    only: tuple[str, ...],
    dtype: str | None,
    report: Path | None,
    timeout: float,
) -> Work:
    """Judge an implementation by cases with known answers, and name the fault that it has.

    RESULTS is a folder of answers that an implementation wrote, <id>.npz or <id>.json for each case. Ends with 0 if all
    is right, 1 if something is wrong, 2 if the request makes no sense.
    """
    _check_mode(paths, adapter, list_cases, export_to, captured)
    if full and not captured:
        raise SpecError("usage", "--full goes with --capture")
    if captured and (known or only):
        raise SpecError("usage", "--known and --only choose among cases, which --capture has none of")
    if captured and dtype:
        raise SpecError("usage", "--dtype is no choice with --capture: the capture itself declares it")
    if report is not None and (list_cases or export_to):
        raise SpecError("usage", "--report has nothing to tell of --list and --export")
    if captured:
        if report is not None:
            prepare_folder(report)
        return lambda _: _check_capture([*captured, *paths], full, report)
    everything = vectors.load()
    expected_to_fail = frozenset() if known is None else read_known(known, everything)
    chosen = select(everything, only)
    if list_cases:
        return lambda _: _list(chosen)
    if export_to is not None:
        return lambda _: _export(chosen, export_to)
    if adapter is not None:
        check_spec(adapter)
    declared = None if adapter else _redeclared(checking.read_declaration(paths[0]), dtype)
    if report is not None:
        prepare_folder(report)

    def work(group: MpiCollectives | None) -> int:
        if adapter is None:
            assert declared is not None
            checked = _check_results(chosen, everything, paths[0], declared)
        else:
            checked = _check_adapter(chosen, adapter, dtype, group, timeout)
        return _conclude(replace(checked, known=expected_to_fail), report, group)

    return work


def _check_mode(
    paths: Sequence[Path], adapter: str | None, list_cases: bool, export_to: Path | None, captured: Sequence[Path]
) -> None:
    """Exactly one thing to do, and only adapters have ranks."""
    modes = {
        "--adapter": adapter is not None,
        "--list": list_cases,
        "--export": export_to is not None,
        "--capture": bool(captured),
        "RESULTS": bool(paths) and not captured,
    }
    chosen = [mode for mode, given in modes.items() if given]
    if len(chosen) != 1:
        told = f"{' and '.join(chosen)} exclude each other" if chosen else "nothing to check"
        raise SpecError("usage", f"{told}: give a folder of results, or one of {', '.join(list(modes)[:4])}")
    if len(paths) > 1 and not captured:
        raise SpecError("usage", f"one folder of results at a time, not {len(paths)}")
    told_ranks = launched()
    if told_ranks is not None and told_ranks[1] > 1 and adapter is None:
        raise SpecError("usage", f"{chosen[0]} is the work of one process, but the launcher started {told_ranks[1]}")


def _list(chosen: Sequence[Vector]) -> int:
    for case in (vector.case for vector in chosen):
        click.echo(
            f"{case.id}\n    {case.operation}; {' '.join(case.clauses)}; {', '.join(case.features)}\n    {case.why}"
        )
    return 0


def _export(chosen: Sequence[Vector], folder: Path) -> int:
    count = export_cases(chosen, folder)
    click.echo(f"{len(chosen)} cases, {count} files in {folder}: README.md there says how to answer them")
    return 0


def _check_results(
    chosen: Sequence[Vector], everything: Sequence[Vector], folder: Path, declaration: Declaration
) -> Checked:
    with _progress(len(chosen)) as advance:
        results = checking.judge_results(chosen, folder, declaration, advance)
    notes = []
    if strangers := checking.strangers(everything, folder):
        some = ", ".join(strangers[:5]) + (", ..." if len(strangers) > 5 else "")
        notes.append(f"{len(strangers)} files belong to no case: {some}")
    return Checked(
        f"results in {checking.note(folder)}", declaration, tuple(results), _by_id(chosen), notes=tuple(notes)
    )


def _check_adapter(
    chosen: Sequence[Vector], spec: str, dtype: str | None, group: MpiCollectives | None, timeout: float
) -> Checked:
    quiet = group is not None and group.rank != 0
    if group is None:
        adapter = _redeclared_adapter(load(spec), dtype)
        subject = spec
        with _progress(len(chosen), quiet) as advance:
            results = checking.run_adapter(chosen, adapter, advance, timeout, _end)
    else:
        patient = MpiCollectives(timeout=timeout + 2 * GRACE_SECONDS if timeout else FOREVER)
        end = partial(patient.abort, status=UNUSABLE)
        adapter = _redeclared_adapter(load_on_ranks(spec, patient, end), dtype)
        subject = f"{spec} on {group.size} ranks"
        with _progress(len(chosen), quiet) as advance:
            results = run_adapter_on_ranks(chosen, adapter, patient, end, timeout, advance)
    return Checked(subject, adapter.declaration, tuple(results), _by_id(chosen))


def _end(error: SpecError) -> None:
    """End this process from a thread beside the one that does not come back."""
    Console(stderr=True).show_cursor(True)
    say(f"{error.message} (--timeout)")
    os._exit(UNUSABLE)


def _check_capture(paths: Sequence[Path], full: bool, report: Path | None) -> int:
    from refimpl.conformance.capture.check import check_capture

    errors = Console(stderr=True)
    columns = (TextColumn("checking"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("check", total=1.0)
        checked = check_capture(paths, full, lambda share: bar.update(task, completed=share))
    return _conclude(checked, report, None)


def _redeclared(declaration: Declaration, dtype: str | None) -> Declaration:
    return declaration if dtype is None else replace(declaration, dtype=dtype)


def _redeclared_adapter(adapter: Adapter, dtype: str | None) -> Adapter:
    return replace(adapter, declaration=_redeclared(adapter.declaration, dtype))


def _by_id(chosen: Sequence[Vector]) -> dict[str, Vector]:
    return {vector.case.id: vector for vector in chosen}


def _conclude(checked: Checked, report: Path | None, group: MpiCollectives | None) -> int:
    """Diagnose, show and write what was found, on the first rank."""
    if group is None or group.rank == 0:
        checked = checked if checked.diagnosis else diagnosed(checked)
        console = Console(file=sys.stdout)
        if not console.is_terminal:
            console = Console(file=sys.stdout, width=WIDTH)
        show(checked, console)
        if report is not None:
            write_reports(report, checked)
    return 0 if checked.passed else NOT_CONFORMING


@contextmanager
def _progress(total: int, quiet: bool = False) -> Iterator[Progressing]:
    """A progress bar on a terminal; calling what it gives advances it."""
    errors = Console(stderr=True)
    columns = (TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=quiet or not errors.is_terminal) as bar:
        task = bar.add_task("check", total=total)
        yield lambda _: bar.advance(task)
