"""The machine that runs PTX: kernels of a few lines with known answers, and faults that it must find."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tools.witness.instructions import compile_instruction
from tools.witness.machine import Machine
from tools.witness.memory import Fault, Global
from tools.witness.ptx import parse

HEAD = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u64 .ptr .global .align 1 kernel_param_1
)
.reqntid {threads}
{{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<99>;
	.reg .b32 	%r<99>;
	.reg .b64 	%rd<99>;
	ld.param.b64 	%rd1, [kernel_param_0];
	ld.param.b64 	%rd2, [kernel_param_1];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd4, %rd1, %rd3;
	add.s64 	%rd5, %rd2, %rd3;
"""


def run(body: str, x: Tensor, y: Tensor, threads: int = 64, shared_bytes: int = 4096) -> Tensor:
    """y after one program; %r1 is the thread, %rd4 and %rd5 its element of x and of y (four bytes each)."""
    memory = Global()
    kernel = parse(HEAD.format(threads=threads) + body + "\n\tret;\n}\n")
    machine = Machine(kernel, shared_bytes, memory, compile_instruction)
    machine.parameters[:16] = np.array([memory.address_of(x), memory.address_of(y)], np.uint64).view(np.uint8)
    with np.errstate(all="ignore"):
        machine.run((0, 0, 0))
    return y


def ints(count: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**31), 2**31, (count,), generator=generator)
    values[:4] = torch.tensor([0, -1, -(2**31), 2**31 - 1])
    return values.int()


def _by_halves(function: Callable[[int, int], int], a: int, b: int) -> int:
    return sum(function((a >> shift) & 0xFFFF, b >> shift & 0xFFFF) << shift for shift in (0, 16))


ARITHMETIC: dict[str, Callable[[int], int]] = {
    "mul.hi.u32 %r3, %r2, -766435501;": lambda a: (a % 2**32) * 0xD2511F53 >> 32,
    "mul.hi.s32 %r3, %r2, 1000003;": lambda a: a * 1000003 >> 32,
    "mul.wide.u32 %rd6, %r2, -766435501; shr.u64 %rd7, %rd6, 33; cvt.u32.u64 %r3, %rd7;": lambda a: (
        (a % 2**32) * 0xD2511F53 >> 33
    ),
    "mul.wide.s32 %rd6, %r2, -7; shr.s64 %rd7, %rd6, 1; cvt.u32.u64 %r3, %rd7;": lambda a: -7 * a >> 1,
    "mad.lo.s32 %r3, %r2, 77, %r2;": lambda a: 78 * a,
    "div.s32 %r3, %r2, 7;": lambda a: abs(a) // 7 * (1 if a >= 0 else -1),
    "rem.s32 %r3, %r2, 7;": lambda a: abs(a) % 7 * (1 if a >= 0 else -1),
    "shr.s32 %r3, %r2, 40;": lambda a: -1 if a < 0 else 0,
    "shr.u32 %r3, %r2, 40;": lambda a: 0,
    "shl.b32 %r3, %r2, 5;": lambda a: a << 5,
    "bfe.u32 %r3, %r2, 7, 9;": lambda a: a >> 7 & 511,
    "bfe.s32 %r3, %r2, 3, 1;": lambda a: -(a >> 3 & 1),
    "prmt.b32 %r3, %r2, 0, 0x0123;": lambda a: int.from_bytes((a % 2**32).to_bytes(4, "little"), "big"),
    "min.s32 %r3, %r2, 5;": lambda a: min(a, 5),
    "mov.u32 %r4, 0x00017BFF; min.u16x2 %r3, %r2, %r4;": lambda a: _by_halves(min, a, 0x00017BFF),
    "mov.u32 %r4, 0x00017BFF; min.u16x2 %r5, %r2, %r4; set.neu.u32.f16x2 %r3, %r5, %r2;": lambda a: _by_halves(
        lambda v, most: 0xFFFF * (v > most), a, 0x00017BFF
    ),
    "setp.lt.u32 %p1, %r2, 100; selp.b32 %r3, 1, 2, %p1;": lambda a: 1 if a % 2**32 < 100 else 2,
    "mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r3, {%rs2, %rs1};": lambda a: (a % 2**32) >> 16 | a << 16,
    "@!%p1 mov.u32 %r3, 4; setp.lt.s32 %p1, %r2, 0; @%p1 mov.u32 %r3, 9;": lambda a: 9 if a < 0 else 4,
}


@pytest.mark.parametrize("code", ARITHMETIC)
def test_whole_numbers(code: str) -> None:
    x = ints()
    lines = "\n".join(f"\t{one};" for one in code.split(";") if one.strip())
    made = run(f"\tld.global.b32 %r2, [%rd4];\n{lines}\n\tst.global.b32 [%rd5], %r3;", x, torch.zeros(64).int())
    expected = [(ARITHMETIC[code](a) + 2**31) % 2**32 - 2**31 for a in x.tolist()]
    assert made.tolist() == expected


def test_rounding() -> None:
    x = torch.tensor([1.0, 1.00390625, 1.01171875, 1e-40, 3.4e38, float("inf"), -0.0, 7.1] * 8)
    code = "ld.global.b32 %r2, [%rd4]; cvt.rn.bf16.f32 %rs1, %r2; cvt.f32.bf16 %r3, %rs1; st.global.b32 [%rd5], %r3;"
    made = run("\n".join(f"{one};" for one in code.split(";") if one.strip()), x, torch.zeros(64))
    assert torch.equal(made, x.bfloat16().float())


SHARED = """
	shl.b32 	%r2, %r1, 2;
	xor.b32 	%r3, %r2, 128;
	st.shared.b32 	[%r2], %r1;
	{between}
	ld.shared.b32 	%r4, [%r3];
	st.global.b32 	[%rd5], %r4;
"""


@pytest.mark.parametrize("code", ["add.f32 {0}, {1}, {2};", "mul.f32 {0}, {1}, {2};", "fma.rn.f32 {0}, {1}, {2}, {2};"])
def test_what_is_no_number_has_the_same_bits_in_every_order(code: str) -> None:
    nans = "mov.b32 %r2, 0x7f812345;\n mov.b32 %r3, 0xffc00001;\n "
    body = nans + code.format("%r4", "%r2", "%r3") + "\n " + code.format("%r5", "%r3", "%r2")
    body += "\n xor.b32 %r6, %r4, %r5;\n st.global.b32 [%rd5], {};"
    assert not run(body.format("%r6"), ints(), torch.ones(64).int()).any()
    assert run(body.format("%r4"), ints(), torch.ones(64).int()).tolist() == [0x7FFFFFFF] * 64


def test_barriers() -> None:
    made = run(SHARED.format(between="bar.sync 0;"), ints(), torch.zeros(64).int())
    assert made.tolist() == [one ^ 32 for one in range(64)]
    with pytest.raises(Fault, match="another has written since the last barrier"):
        run(SHARED.format(between=""), ints(), torch.zeros(64).int())


def test_branches_come_together_again() -> None:
    """Each thread goes round as often as its number says; then all wait."""
    body = """
	mov.u32 	%r2, 0;
	mov.u32 	%r3, 0;
$L__LOOP:
	setp.ge.u32 	%p1, %r3, %r1;
	@%p1 bra 	$L__END;
	add.s32 	%r2, %r2, %r3;
	add.s32 	%r3, %r3, 1;
	bra.uni 	$L__LOOP;
$L__END:
	bar.sync 	0;
	setp.gt.u32 	%p2, %r1, 59;
	@%p2 ret;
	st.global.b32 	[%rd5], %r2;
"""
    made = run(body, ints(), torch.full((64,), -1).int())
    assert made.tolist() == [one * (one - 1) // 2 if one < 60 else -1 for one in range(64)]


COPY = """
	shl.b32 	%r2, %r1, 2;
	cp.async.ca.shared.global [ %r2 + 0 ], [ %rd4 + 0 ], 0x4;
	cp.async.commit_group;
	{between}
	bar.sync 	0;
	ld.shared.b32 	%r4, [%r2];
	st.global.b32 	[%rd5], %r4;
	cp.async.wait_group 0;
"""


def test_copies_are_there_when_they_were_waited_for() -> None:
    x = ints()
    assert torch.equal(run(COPY.format(between="cp.async.wait_group 0;"), x, torch.zeros(64).int()), x)
    assert not torch.equal(run(COPY.format(between="cp.async.wait_group 1;"), x, torch.zeros(64).int()), x)
    with pytest.raises(Fault, match="in flight"):
        run(COPY.format(between="").replace("cp.async.wait_group 0;", ""), x, torch.zeros(64).int())


PRODUCT = """
	mov.b32 	%r9, 0x3f803f80;
	{moves}
	mov.u64 	%rd9, {descriptor};
	shl.b32 	%r2, %r1, 2;
	st.shared.b32 	[%r2], %r9;
	fence.proxy.async.shared::cta;
	bar.sync 	0;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r20,%r21,%r22,%r23}}, {{%r9,%r9,%r9,%r9}}, %rd9, 0, 1, 1, 0;
	wgmma.commit_group.sync.aligned;
	{before}
	wgmma.wait_group.sync.aligned 0;
	st.global.b32 	[%rd5], %r20;
"""


def test_products_read_their_registers_until_they_are_waited_for() -> None:
    """Ones of 64 x 16 and 16 x 8; B without a swizzle, its two blocks of 8 x 8 128 bytes apart."""
    descriptor = 8 << 16 | 16 << 32
    body = PRODUCT.format(moves="", descriptor=descriptor, before="")
    assert run(body, ints(128), torch.zeros(128), threads=128).tolist() == [16.0] * 128
    body = PRODUCT.format(moves="", descriptor=descriptor, before="mov.b32 %r9, 0;")
    assert run(body, ints(128), torch.zeros(128), threads=128).tolist() == [0.0] * 128


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("add.s64 %rd6, %rd4, 4;\n ld.global.b32 %r2, [%rd6];", "4 bytes at byte 256 of a tensor's 256"),
        ("sub.s64 %rd6, %rd4, 4;\n ld.global.b32 %r2, [%rd6];", "4 bytes at byte -4 of a tensor's 256"),
        pytest.param(
            "mov.u64 %rd6, 4096;\n ld.global.b32 %r2, [%rd6];",
            "4 bytes at 0x1000 are in no tensor's memory",
            id="in no tensor's memory",
        ),
        ("add.s64 %rd6, %rd5, 1;\n st.global.b32 [%rd6], %r1;", "is no multiple of 4"),
        ("mov.u32 %r2, 4096;\n ld.shared.b32 %r3, [%r2];", "of 4096 bytes of shared memory"),
        ("mov.u32 %r2, 0;\n st.shared.b32 [%r2], %r1;", "warps write different values"),
        ("frobnicate.sync.b32 %r2, %r1;", "line 18: frobnicate.sync.b32: the witness does not know"),
        ("cvt.rzi.s32.f32 %r2, %r1;", "the witness does not know"),
        ("setp.lt.and.s32 %p1, %r1, 4, %p2;", "the witness does not know"),
        ("bar.sync 1, 64;", "only barriers of a whole program"),
        ("$L__A:\n bra $L__A;", "no end after"),
    ],
)
def test_faults(body: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.witness.machine._MOST_STEPS", 2000)
    with pytest.raises(Fault, match=said):
        run(body, ints().clone(), torch.zeros(64).int())


def test_tensors_without_memory_are_passed_over() -> None:
    """Whoever else has tensors in this process: fake ones, sparse ones, of another device, freed."""
    with FakeTensorMode():
        others = [torch.zeros(4)]
    others += [torch.zeros(4, device="meta"), torch.eye(3).to_sparse(), torch.zeros(4)]
    others[-1].untyped_storage().resize_(0)
    with pytest.raises(Fault, match="in no tensor's memory"):
        run("mov.u64 %rd6, 4096;\n ld.global.b32 %r2, [%rd6];", ints().clone(), torch.zeros(64).int())
    assert len(others) == 4  # they were alive


def test_text_without_a_kernel() -> None:
    with pytest.raises(ValueError, match=re.escape("text: expected PTX with an .entry")):
        parse(".version 8.7\n")


def test_masked_threads_neither_read_nor_write() -> None:
    body = """
	setp.lt.u32 	%p1, %r1, 3;
	mul.wide.u32 	%rd6, %r1, 4000000;
	add.s64 	%rd7, %rd4, %rd6;
	mov.u32 	%r2, 5;
	setp.eq.b32 	%p2, %r1, 0;
	@%p2 ld.global.b32 	%r2, [%rd7];
	@%p1 st.global.b32 	[%rd5], %r2;
"""
    x = ints()
    assert run(body, x, torch.full((64,), -7).int()).tolist() == [x[0].item(), 5, 5] + [-7] * 61
