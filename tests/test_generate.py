"""Expected values, bounds and kills: where they come from, and that a wrong one is noticed before it is written."""

import decimal
from dataclasses import replace

import numpy as np
import pytest

from refimpl import tolerance
from refimpl.conformance import form, generate, vectors, witness, yardstick
from refimpl.conformance.cases import Case
from refimpl.conformance.catalogue import CASES
from refimpl.conformance.faults.mutant import mutant
from refimpl.conformance.implementation import REFERENCE
from refimpl.errors import SpecError
from tests import witness as third
from tests.support import refused

BY_ID = {case.id: case for case in CASES}
STEPS = [case for case in CASES if case.operation.startswith("step_attention")]
WHOLE = [case for case in CASES if case.operation.startswith("attention")]
FAST = [case for case in CASES if case.inputs.get("total_tokens", 0) <= 24 and case.cp_size <= 3]
SOME = FAST[::12]
"""A dozen or two of all kinds that are quick to make."""


@pytest.fixture(scope="module")
def shipped():
    """The right answers on disk, by case."""
    return {vector.case.id: vector.expected for vector in vectors.load()}


def keys_of(case):
    inputs = case.inputs
    if case in STEPS:
        offsets = (inputs[f"cu_seqlens_{x}"] for x in ("q", "q_padded", "kv", "kv_padded"))
        pairs = third.step_pairs(*offsets, inputs["causal"], inputs["window"])
        return third.keys_of(pairs, inputs["cu_seqlens_q_padded"][-1])
    pairs = third.rows(inputs["cu_seqlens"], inputs["cu_seqlens_padded"], inputs["total_tokens"])
    return third.keys_of(third.visible_pairs(pairs, inputs["causal"], inputs["window"]), len(pairs))


def without_padding(case):
    """Tensors in float64, padding 0."""
    inputs, found = case.inputs, {}
    for name, x in case.tensors.items():
        part = ("_kv" if name in "kv" else "_q") if case in STEPS else ""
        real, physical = inputs[f"cu_seqlens{part}"], inputs[f"cu_seqlens{part}_padded"]
        pairs = third.rows(real, physical, inputs.get("total_tokens", physical[-1]))
        is_padding = np.array([document < 0 for document, _ in pairs])
        found[name] = np.where(is_padding[:, None, None], 0, x.astype(np.float64))
    return found


class TestWitness:
    """The witness agrees with a third opinion: SciPy row by row, and complex steps for gradients."""

    @pytest.mark.clause("V4", "A1", "A2", "A3", "A6")
    @pytest.mark.parametrize("case", [c for c in WHOLE + STEPS if "forward" in c.operation], ids=lambda case: case.id)
    def test_forward(self, case):
        found = witness.expected(case)
        tensors = without_padding(case)
        out, lse = third.attention(*(tensors[x] for x in "qkv"), keys_of(case), case.softmax_scale)
        np.testing.assert_allclose(found["out"], out, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(found["lse"], lse, rtol=1e-13, atol=1e-14)

    @pytest.mark.clause("V4", "B1", "B3")
    @pytest.mark.parametrize(
        "case",
        [c for c in WHOLE + STEPS if "backward" in c.operation and len(c.tensors["q"]) <= 20],
        ids=lambda case: case.id,
    )
    def test_backward(self, case):
        found = witness.expected(case)
        tensors = without_padding(case)
        gradients = third.gradients(*(tensors[x] for x in ("q", "k", "v", "dout")), keys_of(case), case.softmax_scale)
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            largest = max(1.0, np.abs(gradient).max())
            np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-13 * largest)

    @pytest.mark.clause("V4", "K4")
    def test_step_mask(self):
        for case in CASES:
            if case.operation == "step_mask":
                inputs = case.inputs
                pairs = third.step_pairs(
                    inputs["cu_seqlens_q"],
                    inputs["cu_seqlens_q_padded"],
                    inputs["cu_seqlens_kv"],
                    inputs["cu_seqlens_kv_padded"],
                    inputs["causal"],
                    inputs["window"],
                )
                assert sorted(pairs) == list(zip(*np.nonzero(witness.expected(case)["visible"]), strict=True))

    @pytest.mark.clause("V4", "L8", "L9")
    def test_layouts_that_ids_tell(self):
        """By hand, from the ids that the cases have."""
        for name, ids, real, physical in (
            ("from-position-ids-one-token", [0, 0, 0, 1, 0], [0, 1, 2, 4, 5], [0, 1, 2, 4, 5]),
            ("from-position-ids-no-rows", [], [0], [0]),
            ("from-segment-ids-padding", [1, 1, 0, 2, 2, 2, 0, 0], [0, 2, 5], [0, 3, 8]),
            ("from-segment-ids-padding-first", [0, 0, 5, 5, 7], [0, 0, 2, 3], [0, 2, 4, 5]),
            ("from-segment-ids-not-ascending-padding", [8, 8, 8, 3, 0, 5, 5, 0], [0, 3, 4, 6], [0, 3, 5, 8]),
            ("from-segment-ids-minus-one", [0, 0, -1, 1, 1, 1, -1], [0, 2, 5], [0, 3, 7]),
            ("from-segment-ids-no-padding-id", [0, 0, 1, 1, 1, 2], [0, 2, 5, 6], [0, 2, 5, 6]),
            ("from-segment-ids-all-padding", [0, 0, 0, 0], [0, 0], [0, 4]),
        ):
            assert BY_ID[name].inputs["ids"] == ids
            found = witness.expected(BY_ID[name])
            assert found["cu_seqlens"].tolist() == real
            assert found["cu_seqlens_padded"].tolist() == physical
            assert found["total_tokens"] == len(ids)

    @pytest.mark.clause("V4", "R3", "R4")
    def test_integers_of_the_worked_examples(self):
        """By hand: DESIGN of documents 5 and 7 on four ranks, and of 6 of 8 rows and 4 on two."""
        found = witness.expected(BY_ID["metadata-packed-contiguous-cp4-spec"])
        assert found["cu_seqlens_q.1.0"].tolist() == [0, 2, 3]
        assert found["cu_seqlens_kv.1.0"].tolist() == [0, 5, 6]
        found = witness.expected(BY_ID["metadata-packed-contiguous-cp2-padding-spec"])
        assert found["cu_seqlens_q.1.0"].tolist() == [0, 0, 4]
        assert found["cu_seqlens_q_padded.1.0"].tolist() == [0, 2, 6]
        assert found["cu_seqlens_kv.1.0"].tolist() == [0, 6, 10]
        found = witness.expected(BY_ID["partition-dual-chunk-swap-cp2-two-documents"])
        assert found["indices.0"].tolist() == [0, 1, 6, 7, 8, 11]
        found = witness.expected(BY_ID["partition-packed-contiguous-cp2-two-documents"])
        assert found["indices.0"].tolist() == [0, 1, 2, 3, 4, 5]
        found = witness.expected(BY_ID["partition-packed-dual-chunk-swap-cp2-two-documents"])
        assert found["indices.0"].tolist() == [0, 1, 2, 9, 10, 11]

    @pytest.mark.clause("V2")
    def test_digits_do_not_matter(self, monkeypatch):
        """30 more digits round to the same float64: nothing is near the middle between two, and zeros are zeros."""
        names = ["attention-backward-causal", "attention-backward-scores-mixed", "merge-low", "merge-eight-parts"]
        before = [witness.expected(BY_ID[name]) for name in names]
        monkeypatch.setattr(witness, "DIGITS", decimal.Context(prec=80, Emin=-(10**9), Emax=10**9))
        for name, arrays in zip(names, before, strict=True):
            for key, x in witness.expected(BY_ID[name]).items():
                assert x.tobytes() == arrays[key].tobytes()

    @pytest.mark.clause("V4")
    def test_it_shares_no_code_with_the_reference(self):
        source = vectors.FOLDER.parents[1] / "refimpl" / "conformance" / "witness.py"
        imported = [line for line in source.read_text().splitlines() if line.startswith(("import", "from"))]
        ours = [line for line in imported if "refimpl" in line]
        assert ours == ["from refimpl.conformance.cases import Case"]
        text = source.read_text()
        assert not any(f"case.{name}" in text for name in ("layout", "mask", "policy", "softmax_scale"))


class TestBounds:
    @pytest.mark.clause("V6", "N2")
    def test_they_are_those_of_the_rule_or_wider(self, require):
        """Those of `refimpl.tolerance`, whose sums a BLAS makes, or of the same size; that of lse may be narrower.

        There the logarithm is rounded before it is added and after, here only after.
        """
        require("ml_dtypes")
        for case in WHOLE:
            expected = witness.expected(case)
            found = yardstick.bounds(case, expected)
            for name in ("float32", "float16", "bfloat16"):
                dtype = tolerance.as_dtype(name)
                tensors = {key: x.astype(dtype) for key, x in case.tensors.items()}
                tensors.setdefault("dout", np.zeros((*tensors["q"].shape[:2], tensors["v"].shape[2]), dtype))
                plain = tolerance.plain_attention(
                    *(tensors[x] for x in ("q", "k", "v", "dout")), case.layout, case.mask, case.softmax_scale
                )
                for key, x in expected.items():
                    largest = tolerance.largest_finite(x)
                    rule = tolerance.Tolerance.of(dtype, tolerance.largest_error(plain[key], x), largest).bound
                    assert found[name][key] >= (0.75 if key == "lse" else 0.9) * rule, (case.id, name, key)
                    if "extreme" not in case.features and largest > 0:  # else rounding is all there is
                        assert found[name][key] <= 3 * rule, (case.id, name, key)

    @pytest.mark.clause("V6")
    def test_the_reference_keeps_them(self, shipped, require):
        """In every dtype, with room to spare."""
        require("ml_dtypes")
        for case in WHOLE:
            expected = shipped[case.id]
            for dtype in expected.bounds:
                answer = generate.reference.answer(case, dtype)
                for name, x in expected.arrays.items():
                    error = tolerance.largest_error(np.asarray(answer[name]), x)
                    assert error <= 0.7 * expected.bounds[dtype][name], (case.id, dtype, name)

    @pytest.mark.clause("V6")
    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_another_implementation_keeps_them(self, dtype, shipped, require):
        """torch's softmax and its own derivative, everything in the dtype."""
        torch = require("torch")
        for case in WHOLE:
            expected = shipped[case.id]
            tensors = without_padding(case)
            q, k, v = (torch.tensor(tensors[x]).to(getattr(torch, dtype)).requires_grad_() for x in "qkv")
            group = q.shape[1] // k.shape[1]
            visible = torch.tensor(np.array([[j in seen for j in range(len(q))] for seen in keys_of(case)]))
            sees = visible.any(dim=1)
            s = torch.einsum("ihc,jhc->hij", q, k.repeat_interleave(group, 1)) * case.softmax_scale
            s = s.masked_fill(~visible & sees[:, None], -torch.inf)
            out = torch.einsum("hij,jhc->ihc", s.softmax(-1), v.repeat_interleave(group, 1)) * sees[:, None, None]
            answer = {"out": out, "lse": s.float().logsumexp(-1).masked_fill(~sees, -torch.inf)}
            if "dout" in tensors:
                out.backward(torch.tensor(tensors["dout"]).to(out.dtype))
                answer = {"dq": q.grad, "dk": k.grad, "dv": v.grad}
            for name, x in expected.arrays.items():
                error = tolerance.largest_error(answer[name].detach().double().numpy(), x)
                assert error <= 0.8 * expected.bounds[dtype][name], (case.id, name)

    @pytest.mark.clause("V6", "P7", "V8")
    def test_moved_data_is_exact(self):
        case = BY_ID["unpartition-dual-chunk-swap-cp2"]
        assert set(yardstick.bounds(case, witness.expected(case))["bfloat16"].values()) == {0.0}
        assert yardstick.bounds(BY_ID["mask-window"], witness.expected(BY_ID["mask-window"])) == {}

    @pytest.mark.clause("V6")
    def test_rounding(self, require):
        """To bfloat16 as ml_dtypes does it: halves to even, overflow, infinity and NaN."""
        bfloat16 = require("ml_dtypes").bfloat16
        random = np.random.default_rng(0)
        x = random.standard_normal(4000).astype(np.float32) * np.float32(2.0) ** random.integers(-120, 120, 4000)
        halves = np.float32([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 256.5, 257, 259, 3.4e38, np.inf, -np.inf, np.nan, 0])
        x = np.concatenate([x.astype(np.float32), halves])
        assert np.array_equal(yardstick.to_bfloat16(x), x.astype(bfloat16).astype(np.float32), equal_nan=True)
        assert yardstick.to_float16(np.float32([1e5, 1 + 2**-11])).tolist() == [np.inf, 1.0]

    @pytest.mark.clause("V6")
    def test_sums_run_in_the_order_of_their_indices(self):
        a = np.float32([[1, 2**-24, 2**-24]])
        assert yardstick.product(a, np.ones((3, 1), np.float32)).tolist() == [[1.0]]
        assert yardstick.product(a[:, ::-1], np.ones((3, 1), np.float32)).tolist() == [[1.0 + 2**-23]]


class TestRefusesToWrite:
    """What may not get into a vector."""

    @pytest.mark.clause("V4")
    def test_a_reference_that_answers_otherwise(self, monkeypatch):
        case = BY_ID["positions-padding"]
        right = witness.expected(case)
        monkeypatch.setitem(
            generate.ANSWERS, "the reference in pieces", lambda _: right | {"positions": -right["positions"]}
        )
        with refused("usage", "positions-padding", "the reference in pieces and the witness differ", "positions"):
            generate.vector_of(case)

    @pytest.mark.clause("V4")
    def test_a_reference_that_refuses_or_does_not(self, monkeypatch):
        def refuse(case):
            raise SpecError("policy", "no")

        monkeypatch.setitem(generate.ANSWERS, "the public reference", refuse)
        with refused("usage", "the public reference refuses with policy, the witness with None"):
            generate.vector_of(BY_ID["positions-padding"])
        monkeypatch.setitem(generate.ANSWERS, "the public reference", lambda case: {})
        with refused("usage", "refuses with None, the witness with offsets_start"):
            generate.vector_of(BY_ID["refuse-offsets-start"])

    @pytest.mark.clause("V5")
    @pytest.mark.parametrize(
        ("inputs", "codes"),
        [
            ({"cu_seqlens": [1, 4, 3], "cu_seqlens_padded": [0, 4], "total_tokens": 2}, "'offsets_count'"),
            ({"cu_seqlens": [0, 4], "cu_seqlens_padded": [0, 4], "total_tokens": 4}, "[]"),
        ],
    )
    def test_a_request_that_is_wrong_twice_or_not_at_all(self, inputs, codes):
        case = Case("refuse-x", "refuse", "x", ("L2",), ("refuse",), inputs | {"call": "layout"})
        with refused("usage", "refuse-x: expected one fault", codes):
            generate.expected_of(case)

    @pytest.mark.clause("V1")
    @pytest.mark.parametrize(
        ("value", "complaint"), [(0.1, "not every dtype"), (1e5, "not every dtype"), (np.nan, "in a token")]
    )
    def test_inputs_that_are_not_the_same_for_everyone(self, value, complaint):
        case = BY_ID["attention-forward-causal"]
        k = case.tensors["k"].copy()
        k[3, 1, 2] = value
        with refused("usage", "attention-forward-causal: k holds", complaint):
            generate.vector_of(replace(case, tensors=case.tensors | {"k": k}))

    @pytest.mark.clause("V6")
    def test_numbers_that_overflow_a_dtype(self):
        case = BY_ID["attention-forward-causal"]
        loud = replace(case, tensors={name: x * np.float32(1000) for name, x in case.tensors.items()})
        with refused("usage", "overflows"), np.errstate(all="ignore"):
            generate.expected_of(loud)

    @pytest.mark.clause("V7")
    @pytest.mark.parametrize(("by", "outcome"), [(1.5, "luck"), (9, "luck"), (11, "killed"), (0.9, "alive")])
    def test_a_mutant_that_dies_by_luck(self, monkeypatch, by, outcome):
        case = BY_ID["attention-forward-causal"]
        expected = generate.expected_of(case)
        error = by * expected.bounds["float64"]["out"]
        slight = mutant("slight", "numerics", "is off", finish=lambda name, x, *_: x + error if name == "out" else x)
        monkeypatch.setattr(generate, "MUTANTS", (slight,))
        if outcome == "luck":
            with refused("usage", "slight fails by", "bounds only"):
                generate.kills_of(case, expected)
        else:
            assert generate.kills_of(case, expected) == (("slight",) if outcome == "killed" else ())

    @pytest.mark.clause("V7")
    def test_a_mutant_that_survives(self, monkeypatch):
        twin = mutant("twin", "numerics", "is right", softmax=lambda s, visible: tuple(REFERENCE.softmax(s, visible)))
        monkeypatch.setattr(generate, "MUTANTS", (twin,))
        with refused("usage", "no case finds twin"):
            generate.check_kills(generate.make(SOME[:2]))

    @pytest.mark.clause("V4")
    @pytest.mark.parametrize("code", ["L2", "L3", "L4", "L8", "L9", "P6", "R7", "K3", "A8"])
    def test_the_witness_knows_faults_from_the_spec(self, code):
        asked = [case for case in CASES if case.operation == "refuse" and code in case.clauses]
        assert asked
        for case in asked:
            (found,) = witness.faults(case)
            assert case.id.startswith(f"refuse-{found.replace('_', '-')}")


class TestCommand:
    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        """A catalogue of a few cases and an empty folder."""
        monkeypatch.setattr(generate, "CASES", SOME[:4])
        monkeypatch.setattr(vectors, "FOLDER", tmp_path / "vectors")
        kinds = [mutant("zeros", "zeros", "is 0", positions=lambda layout: 0 * layout.positions)]
        monkeypatch.setattr(generate, "MUTANTS", kinds)
        return tmp_path / "vectors"

    @pytest.mark.clause("V2", "V3")
    def test_what_it_writes_it_finds_up_to_date(self, folder, capsys):
        assert generate.main([]) == 0
        assert len(vectors.load(folder)) == 4
        assert generate.main(["--check"]) == 0
        assert capsys.readouterr().out.splitlines()[-1].endswith("; 0 changed")

    @pytest.mark.clause("V2")
    @pytest.mark.parametrize(
        ("damage", "complaint"),
        [
            (lambda path: path.write_text(path.read_text().replace('"clauses"', '"clause"')), "line 6 has"),
            (lambda path: path.write_bytes(path.read_bytes() + b"\n"), "bytes are not the"),
            (lambda path: path.unlink(), "missing"),
            (lambda path: path.with_name("more.npz").write_bytes(b"x"), "more.npz: no case has it"),
        ],
    )
    def test_check_tells_what_differs_and_writes_nothing(self, folder, capsys, damage, complaint):
        generate.main([])
        damage(folder / f"{SOME[0].id}.json")
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        capsys.readouterr()
        assert generate.main(["--check"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "1 files differ" in line
        assert complaint in line
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert generate.main([]) == 0
        assert generate.main(["--check"]) == 0

    @pytest.mark.clause("V2")
    def test_other_files_are_left_alone(self, folder):
        folder.mkdir()
        for name in ("README.md", "schema.json"):
            (folder / name).write_text("kept")
        (folder / "old.json").write_text("{}")
        generate.main([])
        assert (folder / "README.md").read_text() == (folder / "schema.json").read_text() == "kept"
        assert not (folder / "old.json").exists()

    @pytest.mark.clause("V4")
    def test_disagreement_is_one_line_and_writes_nothing(self, folder, capsys, monkeypatch):
        monkeypatch.setitem(generate.ANSWERS, "the public reference", lambda case: {})
        assert generate.main([]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"generate: {SOME[0].id}: the public reference")
        assert not folder.exists()

    @pytest.mark.clause("V2")
    def test_no_progress_into_a_pipe(self, folder, capsys):
        generate.main([])
        assert capsys.readouterr().err == ""


@pytest.mark.clause("V2", "V4", "V7")
def test_some_vectors_are_up_to_date():
    """Made anew, byte for byte, kills and all; the slow test and CI do it for all."""
    for case in SOME:
        for name, content in vectors.encode(generate.vector_of(case)).items():
            assert (vectors.FOLDER / name).read_bytes() == content, (
                f"{name}: run python -m refimpl.conformance.generate"
            )


@pytest.mark.slow
@pytest.mark.clause("V2", "V4", "V7")
def test_all_vectors_are_up_to_date(capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.clause("V8")
def test_expected_names_are_the_operations_own(shipped):
    for case in CASES:
        names = {name.split(".")[0] for name in shipped[case.id].arrays}
        assert names == form.ANSWERS[case.operation]
