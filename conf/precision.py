"""What `auto` means as a precision: bfloat16 where the device computes it, float32 where it would be emulated."""

from pathlib import Path

# Linux's names for it, on x86 and on Arm.
NATIVE = {"avx512_bf16", "amx_bf16", "bf16"}
CPU_INFO = Path("/proc/cpuinfo")


def computes_bfloat16(device: str) -> bool:
    """Whether products of bfloat16 run in hardware: on every GPU that is `cuda` here, and on a CPU that says so."""
    if device == "cuda":
        return True
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    words = {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}
    return bool(NATIVE & words)


def auto(device: str) -> dict[str, str]:
    """Dotted field -> what its `auto` means on this machine."""
    native = computes_bfloat16(device)
    return {
        "rollout.dtype": "bfloat16" if native else "float32",
        "update.precision": "bf16" if native else "fp32",
    }
