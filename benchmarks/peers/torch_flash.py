"""FlashAttention 2 for peers where the package flash-attn is not installed: the same kernels, as they are in torch.

flash-attn has no wheels for many versions of torch and CUDA. torch is built with its kernels, so here they get the
package's names. A result that used them says so.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

METADATA = "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n"
PADDING = (
    "from transformers.modeling_flash_attention_utils import _pad_input as pad_input, _unpad_input as unpad_input\n"
)


def provide_flash_attn(folder: Path) -> str:
    """Makes `import flash_attn` work in this process and those it starts; returns what it is. Call it before importing
    Transformers, which looks for the package then."""
    try:
        return f"flash-attn {version('flash-attn')}"
    except PackageNotFoundError:
        pass
    site, here = folder / "site", str(Path(__file__).parent)
    for path, text in {
        "flash_attn/__init__.py": "from torch_flash import flash_attn_func, flash_attn_varlen_func\n"
        "flash_attn_with_kvcache = None\n",
        "flash_attn/bert_padding.py": PADDING,
        "flash_attn-2.8.3.dist-info/METADATA": METADATA,
        "flash_attn-2.8.3.dist-info/top_level.txt": "flash_attn\n",
    }.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    sys.path[:0] = [str(site), here]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), here, os.environ.get("PYTHONPATH")]))
    return "the FlashAttention 2 of torch (flash-attn is not installed)"


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), deterministic: bool = False,
) -> Any:  # fmt: skip
    import torch

    # The kernel takes fewer key/value heads than query heads as they are.
    left, right = (None if size < 0 else size for size in window_size)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k), dropout_p, causal, False,
        scale=softmax_scale, window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), deterministic: bool = False,
) -> Any:  # fmt: skip
    import torch

    left, right = (None if size < 0 else size for size in window_size)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, False,
        scale=softmax_scale, window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip
