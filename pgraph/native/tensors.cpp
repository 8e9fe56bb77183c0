/* Tensors for the launches of `launch.c`: what PyTorch's Python functions do for it, without a Python call, the
 * reading of tuples and a further call for the address. PyTorch's own allocator and its own tensors, so that
 * nobody can tell them from those of `empty_strided`.
 *
 * Where a function returns NULL there is no Python error: the caller asks the Python function, whose error says
 * what was wrong. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/EmptyTensor.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/Dtype.h>

#include <cstdint>
#include <exception>

/* From torch/csrc/autograd/python_variable.h, which would take ten times as long to compile. */
TORCH_PYTHON_API PyObject* THPVariable_Wrap(const at::TensorBase& var);

#ifdef PGRAPH_CUDA
/* From ATen/cuda/CUDAContextLight.h, which needs CUDA's own headers. */
namespace at::cuda {
TORCH_CUDA_CPP_API c10::Allocator* getCUDADeviceAllocator();
}
#endif

namespace {

at::TensorBase empty(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, int64_t device)
{
    if (device < 0)
        return at::detail::empty_strided_cpu(size, stride, dtype);
#ifdef PGRAPH_CUDA
    /* As `empty_strided_cuda`, without its guard: to leave that asks the driver whether there is a context. */
    return at::detail::empty_strided_generic(
        size, stride, at::cuda::getCUDADeviceAllocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
#else
    throw std::exception();
#endif
}

} // namespace

/* The number of a torch.dtype, which the other functions take; -1: it is none. */
extern "C" int64_t pg_scalar_type(PyObject* dtype)
{
    return THPDtype_Check(dtype) ? static_cast<int64_t>(reinterpret_cast<THPDtype*>(dtype)->scalar_type) : -1;
}

/* A new tensor, and where it lies.
 *
 * layout: `ndim` sizes, then as many strides, in elements.
 * device: -1 for the CPU; else a CUDA device's index, which is current. */
extern "C" PyObject* pg_empty(int64_t ndim, const int64_t* layout, int64_t dtype, int64_t device, uint64_t* address)
{
    try {
        const auto n = static_cast<size_t>(ndim);
        const at::TensorBase made =
            empty({layout, n}, {layout + n, n}, static_cast<at::ScalarType>(dtype), device);
        *address = reinterpret_cast<uint64_t>(made.unsafeGetTensorImpl()->data());
        return THPVariable_Wrap(made);
    } catch (const std::exception&) {
        PyErr_Clear();
        return nullptr;
    }
}

/* A tensor in the storage of another one: its first element lies `offset` elements after the other's. It is no
 * view for autograd, and counts its changes in place by itself.
 *
 * dtype: -1 for the other's; else the elements are of this one, and the other begins where its storage does. */
extern "C" PyObject* pg_alias(
    const at::TensorBase* owner, int64_t ndim, const int64_t* layout, int64_t offset, int64_t dtype)
{
    try {
        const auto n = static_cast<size_t>(ndim);
        at::TensorBase made = at::detail::make_tensor_base<c10::TensorImpl>(
            c10::Storage(owner->storage()), owner->key_set(),
            dtype < 0 ? owner->dtype() : c10::scalarTypeToTypeMeta(static_cast<at::ScalarType>(dtype)));
        made.unsafeGetTensorImpl()->set_sizes_and_strides(
            {layout, n}, {layout + n, n}, owner->storage_offset() + offset);
        return THPVariable_Wrap(made);
    } catch (const std::exception&) {
        PyErr_Clear();
        return nullptr;
    }
}
