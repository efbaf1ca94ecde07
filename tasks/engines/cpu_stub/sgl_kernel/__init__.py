"""Stand-in for SGLang's CUDA kernels, which do not load on a machine without libcuda.

First on the PYTHONPATH of a CPU server only. Importing a kernel works; calling one raises NotImplementedError.
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):  # import machinery probes __path__, __spec__, ... and must find them missing
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return missing
