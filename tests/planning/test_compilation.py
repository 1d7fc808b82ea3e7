"""Tests what the compiling process reports: temporaries, and a step as JSON."""

import dataclasses
import json
from pathlib import Path

from planning.step_findings import compiled, traffic

from jaxtrain.planning import compilation

PROGRAM = """\
HloModule jit_train_step

FileNames
1 "/x/jaxtrain/jaxtrain/training/step.py"
2 "/x/jaxtrain/jaxtrain/models/mlm.py"
3 "/x/jaxtrain/tests/toy.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=19 end_line=19 column=0 end_column=0}
2 {file_name_id=2 function_name_id=1 line=166 end_line=166 column=0 end_column=0}
3 {file_name_id=3 function_name_id=1 line=7 end_line=7 column=0 end_column=0}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=2}

ENTRY %main {
  %conv.1 = (bf16[8,4]{1,0}, u8[0]{0}) custom-call(%p), metadata={op_name="jit(s)/jvp()/conv" stack_frame_id=2}
  %dot.2 = f32[64]{0} dot(%a, %b), metadata={op_name="jit(s)/transpose(jvp())/dot" stack_frame_id=2}
  %norm = f32[8]{0} fusion(%a), metadata={op_name="jit(s)/sqrt" stack_frame_id=3}
  ROOT %again = f32[8]{0} fusion(%a), metadata={op_name="x/rematted_computation/add" stack_frame_id=2}
}
"""  # noqa: E501

DUMP = """\
BufferAssignment:
allocation 0: size 9999, parameter 3, shape |u8[9999]| at ShapeIndex {}:
 value: <12 param.5 @0> (size=9999,offset=0): u8[9999]{0}
allocation 1: size 1000, preallocated-temp:
 value: <13 norm @0> (size=32,offset=0): f32[8]{0}
 value: <14 conv.1{0} @0> (size=256,offset=64): bf16[8,4]{1,0}
 value: <15 dot.2 @0> (size=256,offset=64): f32[64]{0}
 value: <16 again @0> (size=40,offset=512): f32[8]{0}
 value: <17 nobody @0> (size=64,offset=600): f32[16]{0}
allocation 2: size 8888, output shape is |f32[2222]|, maybe-live-out:
 value: <18 dot.2 @0> (size=8888,offset=0): f32[2222]{0}
"""


def test_slots_are_sorted_by_size_and_list_the_lines_that_fill_them() -> None:
    found = compilation.temporaries(DUMP, PROGRAM)
    assert [one.size for one in found] == [256, 64, 40, 32]
    shared, unknown, again, norm = found
    assert shared.shape == "bf16[8,4]"
    assert shared.made_by == ("models/mlm.py:166 (forward)", "models/mlm.py:166 (backward)")
    assert unknown.made_by == ()
    assert again.made_by == ("models/mlm.py:166 (recomputed)",)
    assert norm.made_by == ("training/step.py:19 (forward)",)


def test_dumps_of_newer_compilers_are_parsed() -> None:
    newer = DUMP.replace(": size 1000, pre", ": size 1000, page 0, pre")
    assert newer != DUMP
    assert compilation.temporaries(newer, PROGRAM) == compilation.temporaries(DUMP, PROGRAM)


def test_a_missing_dump_yields_no_temporaries(tmp_path: Path) -> None:
    assert compilation.largest(tmp_path, PROGRAM, 5) == ()
    (tmp_path / "module_1.after_optimizations-buffer-assignment.txt").write_text(DUMP)
    assert len(compilation.largest(tmp_path, PROGRAM, 3)) == 3


def test_a_compiled_step_survives_json() -> None:
    slot = compilation.Temporary(256, "f32[64]", ("models/mlm.py:166 (forward)",))
    step = compiled(largest=(slot,), traffic=(traffic(),))
    values = json.loads(json.dumps(dataclasses.asdict(step)))
    assert compilation.CompiledStep.from_json(values) == step
