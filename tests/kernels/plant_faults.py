"""Plant faults in the kernels, one at a time, and see whether their tests find them.

    python tests/kernels/plant_faults.py partition metadata

A fault is a change of one place in a source: a barrier removed, a wait for copies one group shorter, a shuffle that
reads another lane, an index of a shared array shifted, a condition dropped. Each is built for the CPU and run against
`tests/test_kernels_<source>*.py`, in a process of its own that stops at the first failure. Prints a table, and exits 1
when a fault was not found. A change that is no fault stands in `HARMLESS`, with the reason.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from cupy_backend.host import SOURCES

TESTS = Path(__file__).resolve().parent.parent

RULES = [
    ("barrier removed", r"(?<![\w_])barrier\(\);", ";"),
    ("warp barrier removed", r"warp_barrier\([^;]*\);", ";"),
    ("wait one group shorter", r"cp_async_wait<(\d+)>", lambda m: f"cp_async_wait<{int(m[1]) + 1}>"),
    ("shuffle reads another lane", r"(shuffle_xor\(\w+, [^;]*?, )([^,;]+?)\)", r"\1(\2) * 2)"),
    ("shuffle reads another lane", r"(shuffle(?:_up|_down)?\(\w+, [^;]*?, )([^,;]+?)\)", r"\1(\2) + 1)"),
    ("early return dropped", r"\bif \(([^;{]*)\) return;", r"if (false && (\1)) return;"),
    ("condition dropped", r"\bif \(([^;{]*?)\) (?=[\w\[\]+. ]+ [-+]?= )", r"if (true || (\1)) "),
]

HARMLESS: dict[tuple[str, str], str] = {
    ("metadata", "if (lane_id() == 0) smallest[warp_id()] = value;"): "all are compared, in whatever place they stand",
    ("metadata", "for (int warp = 0; warp < kWarps; warp++) value = minimum(value, smallest[warp]);"): "the same",
    ("metadata", "if (thread_id() > 0) return;"): "all threads write the same",
    ("metadata", "if (thread_id() == 0) cu_q[offsets] = cu_q_padded[offsets] = cu_kv[offsets] = 0;"): "the same",
}
"""(source, text of the line): why a change there is no fault."""


def shared_arrays(text: str) -> list[str]:
    """Names of shared arrays, and of parameters that are handed them."""
    declared = re.findall(r"THDCP_SHARED(?:_ARRAY)?\([\w:]+, (\w+)", text)
    return [*declared, *re.findall(r"(\w+) = \w+\.take<", text)]


def faults(text: str) -> list[tuple[str, int, str]]:
    """(what, line, changed text) of every fault that can be planted."""
    names = dict.fromkeys(shared_arrays(text))
    rules = [*RULES, *((f"index of {name} shifted", rf"\b{name}\[([^\]]+)\]", rf"{name}[(\1) ^ 1]") for name in names)]
    planted = []
    for what, pattern, replacement in rules:
        for match in re.finditer(pattern, text):
            start = text.rfind("\n", 0, match.start()) + 1
            if text[start : match.start()].lstrip().startswith(("//", "THDCP_DEVICE", "THDCP_SHARED")):
                continue
            new = match.expand(replacement) if isinstance(replacement, str) else replacement(match)
            line = text.count("\n", 0, match.start()) + 1
            planted.append((what, line, text[: match.start()] + new + text[match.end() :]))
    return planted


def is_found(source: str, text: str) -> bool:
    """Whether the tests of a source fail when it reads `text`."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "kernels_cu")
        shutil.copytree(SOURCES, copy)
        (copy / f"{source}.cu").write_text(text)
        program = (
            "import sys, pytest; from pathlib import Path; import cupy_backend.host as host;"
            "host.SOURCES = Path(sys.argv[1]);"
            "sys.exit(pytest.main(['-x', '-q', '-p', 'no:cacheprovider', *sys.argv[2:]]))"
        )
        tests = [str(path) for path in sorted(TESTS.glob(f"test_kernels_{source}*.py"))]
        done = subprocess.run(
            [sys.executable, "-c", program, str(copy), *tests],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "THDCP_CACHE": f"{folder}/cache"},
        )
    if done.returncode < 0:  # A kernel that writes far past an array can take the process with it.
        return True
    if done.returncode > 1:
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.returncode == 1


def main(sources: list[str]) -> int:
    missed = 0
    for source in sources:
        text = (SOURCES / f"{source}.cu").read_text()
        planted: Counter[str] = Counter()
        found: Counter[str] = Counter()
        for what, line, changed in faults(text):
            if (source, text.splitlines()[line - 1].strip()) in HARMLESS:
                continue
            planted[what] += 1
            if is_found(source, changed):
                found[what] += 1
            else:
                missed += 1
                print(f"{source}.cu:{line}: {what}: not found", flush=True)
        for what, count in planted.items():
            print(f"{source:12} {what:32} {found[what]} of {count} found", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
