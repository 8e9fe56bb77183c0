"""Names of kernels whose parameters may hold left-over addresses (Note [Left-over addresses])."""

from __future__ import annotations

import functools
import re
from typing import Final

__all__ = ["CUDNN_KERNELS", "leaves_words_over"]


# PyTorch's kernels whose tables of fixed size are filled as far as the op has operands. They are given
# pointers to those operands and to what is allocated for the call, and to nothing else: no random
# generator's state, no buffer that outlives the call. Names as in `at::native`, templates all.
OPERAND_KERNELS: Final = (
    "elementwise_kernel",
    "unrolled_elementwise_kernel",
    "vectorized_elementwise_kernel",
    "index_elementwise_kernel",
    "reduce_kernel",
    "CatArrayBatchedCopy",
    "CatArrayBatchedCopy_contig",
    "CatArrayBatchedCopy_aligned16_contig",
    "CatArrayBatchedCopy_vectorized",
    "multi_tensor_apply_kernel",
)

# cuDNN's, as their names say (`..._execute_kernel__5x_cudnn`, `cutlass__5x_cudnn::Kernel`). PyTorch gives
# cuDNN operands and a workspace that is allocated for the call; cuDNN's own buffers are not in PyTorch's
# memory, and recurrent nets, whose states are, are refused by name. Its structs mix pointers with numbers of
# four bytes. This stands anywhere in a name: a pattern that began with any word would be tried from each of
# its characters on, to the end.
CUDNN_KERNELS: Final = ("5x_cudnn",)

# PyTorch's memory-efficient attention, forward and backward. Its struct mixes pointers to operands with
# numbers of four bytes, beside which half a word is left as it was. A random generator's state is among the
# operands only with dropout, which is refused.
ATTENTION_KERNELS: Final = (
    r"fmha_cutlassF_\w+?N22PyTorchMemEffAttention",
    r"fmha_cutlassB_\w+?N22PyTorchMemEffAttention",
)

# As C++ compilers write them: in `at::native` or an unnamed namespace in it; then template arguments.
_ANY: Final = re.compile(
    rf"_ZN2at6native(\d+_GLOBAL__N_\w*?)?\d+({'|'.join(OPERAND_KERNELS)})I"
    rf"|_Z\d+({'|'.join(ATTENTION_KERNELS)})"
    rf"|\w*({'|'.join(CUDNN_KERNELS)})"
)


@functools.lru_cache(maxsize=4096)
def leaves_words_over(name: str) -> bool:
    """Whether a kernel of this name is one of those that leave words of their structs as they were."""
    return _ANY.match(name) is not None
