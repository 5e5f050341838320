"""Compiles the Triton kernels to machine code as models launch them; needs Triton, but no GPU.

    python -m tests.core.compile_kernels 80 90    # compute capabilities

The interpreter runs kernels that the compiler would refuse.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.models import triton_kernels
from paceline.models.cuda_ops import CudaOps, DeviceRows
from paceline.models.ops import Stack
from tests.core.random_layers import random_stack

MODELS = {
    "Llama 3 8B": (
        torch.bfloat16,
        {"heads": 32, "kv_heads": 8, "dim": 128, "hidden": 4096, "ffn": 14336},
    ),
    "no powers of two": (
        torch.float16,
        {
            "heads": 6, "kv_heads": 2, "dim": 80, "hidden": 480, "ffn": 1300, "norms": True,
            "window": 17,
        },
    ),
    "the widest heads": (
        torch.float32,
        {"heads": 4, "kv_heads": 4, "dim": 256, "hidden": 1024, "ffn": 4096},
    ),
}  # fmt: skip
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}


class Recorder:
    """Stands for the kernels, and keeps what they are launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        class Kernel:
            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *args, **options: self.launches.append((name, args, options))

        return Kernel()


def launches(stack: Stack) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What one layer launches."""
    ops = CudaOps(by_row=False)
    ops._kernels = recorder = Recorder()
    ops.linear = lambda x, weight, bias=None: x.new_empty(len(x), weight.num_outputs)  # type: ignore[method-assign]
    dtype = stack.layers[0].input_norm.dtype
    x = torch.empty(1, stack.hidden_size, dtype=dtype)
    cache = torch.empty(1, 1, stack.num_kv_heads, stack.head_dim, dtype=dtype)
    rows = DeviceRows(torch.empty(8, dtype=torch.int32), 1)
    ops.run_on_device(stack, 0, 1, x, cache, cache, rows)
    return recorder.launches


def compile_launch(name: str, args: tuple[Any, ...], options: dict[str, Any], arch: int) -> str:
    """What the compiled kernel takes of a multiprocessor."""
    kernel = getattr(triton_kernels, name)
    constants = {key: value for key, value in options.items() if not key.startswith("num_")}
    constants |= {"WIDEN": False} if "WIDEN" in constants else {}
    signature, aligned = dict.fromkeys(kernel.arg_names, "constexpr"), {}
    for i, (argument, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[argument] = f"*{TYPES[value.dtype]}"
            aligned[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    launch = {key: options[key] for key in ("num_warps", "num_stages") if key in options}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)
    assert compiled.asm["cubin"]
    # 99 KiB are what every device since compute capability 8.0 has.
    assert compiled.metadata.shared <= 99 * 1024, f"{compiled.metadata.shared} bytes shared"
    return f"{len(compiled.asm['cubin'])} bytes, {compiled.metadata.shared} bytes of shared memory"


def main() -> None:
    for arch in map(int, sys.argv[1:]):
        for model, (dtype, sizes) in MODELS.items():
            seen = set()
            for name, args, options in launches(random_stack(dtype, **sizes)):
                if (key := (name, repr(options))) not in seen:
                    seen.add(key)
                    what = compile_launch(name, args, options, arch)
                    print(f"sm_{arch} {model}: {name} has {what}", flush=True)


if __name__ == "__main__":
    main()
