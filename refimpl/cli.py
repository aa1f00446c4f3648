"""The `thdcp` command: options in, checks called, tables out. No semantics live here.

A click command only checks its options and returns the work to do. Under an MPI launcher all ranks first agree that
they can do it; from there on one rank's failure ends all of them.
"""

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from refimpl.collectives import AgreedError, Collectives, MpiCollectives, describe, launched, run_ranks, say
from refimpl.conformance.command import check
from refimpl.cost import rank_cost
from refimpl.environment import policy_from_environment
from refimpl.errors import SpecError
from refimpl.faults import FAULTS, check_fault
from refimpl.layout import PackedLayout
from refimpl.lengths import default_lengths, parse_lengths
from refimpl.mask import AttentionMask
from refimpl.metadata import rank_metadata
from refimpl.partition import Policy, as_policy, check_ranks
from refimpl.report import prepare_folder, step_as_dict, table, write_reports
from refimpl.tolerance import as_dtype
from refimpl.verify import Backend, CaseResult, Plan, verify_rank

Work = Callable[[MpiCollectives | None], int]

DISAGREES = 1
REFUSED = 2
INTERRUPTED = 130
UNREAD = 141  # as a shell has it for a program that wrote into a pipe that nobody reads
DEFAULT_HEADS = ((2, 2), (4, 2), (2, 1))
SMALL_HEADS = ((4, 2),)
SMALL = (1024, 400)
"""Tokens, and the longest document, of the default batch for kernels on the CPU, which are slow there."""
DEFAULT_DTYPES = {
    "reference": "float64,float32,float16",
    "host": "float32,bfloat16",
    "cupy": "float32,bfloat16,float16",
}
BACKENDS = tuple(DEFAULT_DTYPES)
TABLE_WIDTH = 140


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: 0 all agree, 1 something disagrees, 2 the request cannot be carried out."""
    group: MpiCollectives | None = None
    try:
        group = MpiCollectives() if launched() is not None else None
        _quiet_unless_first(group)
        sys.exit(_agreed_work(group, arguments)(group))
    except AgreedError as error:
        if group is None or group.rank == 0:
            say(describe(error))
    except SpecError as error:
        _end(group, error)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError as error:
        if group is not None and group.size > 1:
            _end(group, error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        sys.exit(UNREAD)
    except Exception as error:
        if os.environ.get("THDCP_TRACEBACK"):
            raise
        _end(group, error)
    sys.exit(REFUSED)


def _end(group: MpiCollectives | None, error: Exception) -> None:
    """One line for an error of this rank alone, which ends all others."""
    if group is not None and group.size > 1:
        group.abort(error, REFUSED)
    told = launched()
    if group is not None or told is None or told[0] == 0:  # without a group every rank comes here: the first speaks
        say(describe(error))


def _quiet_unless_first(group: MpiCollectives | None) -> None:
    if group is not None and group.rank != 0:
        sys.stdout = io.StringIO()


def _agreed_work(group: MpiCollectives | None, arguments: Sequence[str] | None) -> Work:
    """Parse on every rank; either all go on, or all raise the refusal of the lowest rank that has one."""
    refusal: SpecError | None = None
    work: Any = None
    try:
        work = thdcp.main(args=arguments, prog_name="thdcp", standalone_mode=False)
    except click.ClickException as error:
        refusal = SpecError("usage", " ".join(error.format_message().split()))
    except click.Abort:
        raise KeyboardInterrupt from None
    except SpecError as error:
        refusal = error
    if group is not None:
        group.all_agree({}, refusal)
    elif refusal is not None:
        raise refusal
    return work if callable(work) else lambda _: int(work or 0)


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="thdcp", message="thdcp %(version)s")
def thdcp() -> None:
    """An executable specification of packed (THD) context-parallel attention."""


thdcp.add_command(check)


def _integers(text: str, name: str, count: int) -> tuple[int, ...]:
    parts = text.split(",")
    try:
        numbers = tuple(int(part) for part in parts)
    except ValueError:
        numbers = ()
    if len(numbers) != count:
        raise SpecError("usage", f"{name} is {text!r}: expected {count} integers, separated by commas")
    return numbers


def _policies(text: str) -> tuple[Policy, ...]:
    if text == "all":
        return tuple(Policy)
    if text == "environment":
        return (policy_from_environment(),)
    return tuple(dict.fromkeys(as_policy(part.strip()) for part in text.split(",")))


def _head_layouts(
    heads: int | None, kv_heads: int | None, default: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    if heads is None and kv_heads is None:
        return default
    q_heads = heads or kv_heads or 1
    k_heads = kv_heads or q_heads
    if q_heads % k_heads:
        raise SpecError("heads", f"{q_heads} query heads are no multiple of {k_heads} K/V heads")
    return ((q_heads, k_heads),)


def _masks(window: str | None, tokens: int) -> tuple[AttentionMask, ...]:
    """Causal and full, each with and without a window; the default one is shorter than most documents."""
    left, right = (max(1, tokens // 64), max(1, tokens // 128)) if window is None else _integers(window, "--window", 2)
    windowed = AttentionMask(causal=False, window=(left, right))
    masks = AttentionMask(), AttentionMask(causal=True, window=(left, right)), AttentionMask(causal=False), windowed
    return tuple(dict.fromkeys(masks))


def _backend(name: str) -> Backend:
    """The reference, or one of `cupy_backend.backends`: loaded by name, because refimpl rests on nothing above it."""
    if name == "reference":
        return Backend()
    loaded: Backend = import_module("cupy_backend.backends").load(name)
    return loaded


@thdcp.command()
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="reference",
    show_default=True,
    help="What is compared with the oracle: NumPy, the CUDA kernels run on the CPU (slow), or on a GPU.",
)
@click.option("--policy", default="all", show_default=True, help="all, environment, or policies separated by commas.")
@click.option("--cp-size", type=int, help="Ranks in this process, 4 by default; under mpirun its ranks are used.")
@click.option("--lengths", help="Document lengths: a JSON file, a list such as 100,200,0, or a set's name.")
@click.option(
    "--heads", type=click.IntRange(1, 256), help="Query heads; 2:2, 4:2 and 2:1 query to K/V heads by default."
)
@click.option("--kv-heads", type=click.IntRange(1, 256), help="K/V heads; those of the queries by default.")
@click.option("--head-dim", type=click.IntRange(1, 1024), default=32, show_default=True)
@click.option("--dtype", help="Separated by commas; float64,float32,float16 by default. bfloat16 needs ml_dtypes.")
@click.option("--window", help="LEFT,RIGHT of the windowed masks; -1 is unlimited.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--report", type=click.Path(path_type=Path), help="Folder for verify.json and verify.xml (JUnit).")
@click.option("--inject", metavar="FAULT", help=f"Break one rank on purpose: {', '.join(FAULTS)}.")
@click.option("--inject-rank", type=int, help="The rank to break; the last by default.")
def verify(
    backend: str,
    policy: str,
    cp_size: int | None,
    lengths: str | None,
    heads: int | None,
    kv_heads: int | None,
    head_dim: int,
    dtype: str | None,
    window: str | None,
    seed: int,
    report: Path | None,
    inject: str | None,
    inject_rank: int | None,
) -> Work:
    """Run every policy, forward and backward, and compare each rank with a float64 oracle.

    Alone, the ranks are threads of this process; under mpirun, they are its processes. Real documents are packed,
    padded in two ways with NaN in the padding, partitioned, gathered, attended and reduced.
    """
    told = launched()
    size = told[1] if told is not None else 4 if cp_size is None else cp_size
    check_ranks(size)
    if cp_size is not None and cp_size != size:
        raise SpecError("cp_size", f"--cp-size is {cp_size} but the launcher started {size} ranks")
    fault_rank = size - 1 if inject_rank is None else inject_rank
    check_ranks(size, fault_rank)
    batch = SMALL if backend == "host" else ()
    documents = default_lengths(*batch) if lengths is None else parse_lengths(lengths)
    names = (DEFAULT_DTYPES[backend] if dtype is None else dtype).split(",")
    plan = Plan(
        lengths=tuple(documents),
        policies=_policies(policy),
        masks=_masks(window, max(documents)),
        heads=_head_layouts(heads, kv_heads, SMALL_HEADS if backend == "host" else DEFAULT_HEADS),
        head_dim=head_dim,
        dtypes=tuple(dict.fromkeys(as_dtype(name.strip()).name for name in names)),
        seed=seed,
        fault=inject,
        fault_rank=fault_rank,
        backend=backend,
    )
    check_fault(inject, size)
    if backend != "reference" and "float64" in plan.dtypes:
        raise SpecError("dtype", f"--backend {backend} has no float64: its kernels take float32, float16, bfloat16")
    implementation = _backend(backend)
    if report is not None:
        prepare_folder(report)
    return lambda group: _verify(plan, size, group, report, implementation)


def _verify(plan: Plan, size: int, group: MpiCollectives | None, report: Path | None, backend: Backend) -> int:
    console = Console(file=sys.stdout)
    console = (
        console if console.is_terminal and console.width >= TABLE_WIDTH else Console(file=sys.stdout, width=TABLE_WIDTH)
    )
    kind = "threads of this process" if group is None else "MPI processes"
    console.print(
        f"{len(plan.lengths)} documents, {sum(plan.lengths)} tokens, on {size} ranks ({kind}); "
        f"heads {', '.join(f'{q}:{kv}' for q, kv in plan.heads)}, head_dim {plan.head_dim}, seed {plan.seed}"
        + (f"; FAULT {plan.fault}" if plan.fault else "")
    )
    if backend.note:
        console.print(backend.note)
    results = _with_progress(plan, size, group, backend)
    for policy in plan.policies:
        console.print(table(results, policy))
    wrong = [result for result in results if not result.agrees]
    for result in wrong[:5]:
        console.print(f"differs: {result.case.policy}, {result.case.dtype}: {result.first_wrong}", highlight=False)
    console.print(f"{len(results) - len(wrong)} of {len(results)} cases agree with the oracle", highlight=False)
    if report is not None and (group is None or group.rank == 0):
        write_reports(report, results, plan, size)
    return DISAGREES if wrong else 0


def _with_progress(plan: Plan, size: int, group: MpiCollectives | None, backend: Backend) -> list[CaseResult]:
    """Run the plan on the ranks there are, with a progress bar on the first rank's terminal."""
    columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    quiet = not errors.is_terminal or (group is not None and group.rank != 0)
    with Progress(*columns, console=errors, transient=True, disable=quiet) as progress:
        task = progress.add_task("verify", total=plan.num_cases)

        def rank(member: Collectives) -> list[CaseResult]:
            shown = (lambda _: progress.advance(task)) if member.rank == 0 else (lambda _: None)
            return verify_rank(member, plan, on_result=shown, backend=backend)

        return rank(group) if group is not None else run_ranks(size, rank)[0]


@thdcp.command()
@click.option("--policy", required=True, help="A policy, or environment.")
@click.option("--cp-size", type=int, required=True, help="Number of ranks.")
@click.option("--rank", type=int, required=True, help="Whose metadata to show.")
@click.option(
    "--lengths", required=True, help="Document lengths: a JSON file, a list such as 100,200,0, or a set's name."
)
@click.option("--multiple-of", type=int, default=1, show_default=True, help="Pad every document to a multiple of this.")
@click.option("--total-tokens", type=int, help="Rows of the buffer; the documents' rows by default.")
@click.option("--causal/--no-causal", default=True, show_default=True)
@click.option("--window", default="-1,-1", show_default=True, help="LEFT,RIGHT; -1 is unlimited.")
def metadata(
    policy: str,
    cp_size: int,
    rank: int,
    lengths: str,
    multiple_of: int,
    total_tokens: int | None,
    causal: bool,
    window: str,
) -> Work:
    """Show, as JSON, which rows a rank holds and what its kernel must be told."""
    layout = PackedLayout.from_lengths(parse_lengths(lengths), multiple_of, total_tokens=total_tokens)
    left, right = _integers(window, "--window", 2)
    mask = AttentionMask(causal, (left, right))
    (chosen,) = _policies(policy) if policy != "all" else (as_policy(policy),)
    meta = rank_metadata(layout, chosen, cp_size, rank, mask)
    cost = rank_cost(layout, chosen, cp_size, rank, mask, meta)
    shown = {
        "policy": chosen,
        "cp_size": cp_size,
        "cp_rank": rank,
        "total_tokens": layout.total_tokens,
        "indices": meta.indices.tolist(),
        "steps": [step_as_dict(step) for step in meta.steps],
        "step_rows": [rows.tolist() for rows in meta.step_rows],
        "kv_ranges": meta.kv_ranges.tolist(),
        "visible_pairs": cost.visible_pairs,
    }
    text = json.dumps(shown)

    def work(_: MpiCollectives | None) -> int:
        click.echo(text)
        return 0

    return work


if __name__ == "__main__":
    main()
