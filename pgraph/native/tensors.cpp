/* Tensors in one call, where PyTorch's Python functions take several: PyTorch's own, so that nobody can tell
 * them from those that Python makes.
 *
 * pg_scalar_type, pg_empty, pg_alias: results of the launches of `launch.c`, from PyTorch's own allocator. Where
 * one returns NULL there is no Python error: the caller asks the Python function, whose error says what was wrong.
 *
 * pg_ghost_functions: Python functions for captures, as `pgraph/native/ghosts.py` tells of them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/EmptyTensor.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_set>
#include <utility>
#include <vector>

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

namespace {

/* Where a tensor's Python object holds the C++ tensor, and the class of its implementation (Note [Handles in place]
 * in `launch.c`). */
int64_t handle_offset;
uint64_t handle_class;
PyObject* others[3]; /* what serves a tensor of another class, and torch.Tensor: see pg_ghost_functions */

const at::TensorBase* held(PyObject* tensor)
{
    const char* place = reinterpret_cast<const char*>(tensor) + handle_offset;
    const uint64_t* implementation = *reinterpret_cast<uint64_t* const*>(place);
    const bool known = implementation != nullptr && *implementation == handle_class;
    return known ? reinterpret_cast<const at::TensorBase*>(place) : nullptr;
}

c10::Device device_at(int64_t index)
{
    return index < 0 ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

/* A tensor without elements, on memory that it does not own. */
at::TensorBase empty_handed(void* address, size_t nbytes, c10::Device device, caffe2::TypeMeta dtype)
{
    c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, c10::DataPtr(address, device));
    const auto key = device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
    return at::detail::make_tensor_base<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
}

/* Its storage; NULL if it has none, or is no plain tensor. */
c10::StorageImpl* storage_in(PyObject* tensor)
{
    const at::TensorBase* t = held(tensor);
    return t != nullptr && t->has_storage() ? t->storage().unsafeGetStorageImpl() : nullptr;
}

PyObject* storage_of(PyObject*, PyObject* tensor)
{
    const c10::StorageImpl* s = storage_in(tensor);
    if (s == nullptr)
        return PyObject_CallOneArg(others[0], tensor);
    const auto address = reinterpret_cast<uint64_t>(s->data());
    return Py_BuildValue("KKn", reinterpret_cast<uint64_t>(s), address, static_cast<Py_ssize_t>(s->nbytes()));
}

PyObject* counter_of(PyObject*, PyObject* tensor)
{
    const at::TensorBase* t = held(tensor);
    if (t == nullptr || t->is_inference() || c10::InferenceMode::is_enabled())
        return PyObject_CallOneArg(others[1], tensor);
    try {
        at::TensorBase made = empty_handed(nullptr, 0, t->device(), t->dtype());
        made.unsafeGetTensorImpl()->set_version_counter(t->unsafeGetTensorImpl()->version_counter());
        return THPVariable_Wrap(made);
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return nullptr;
    }
}

bool numbers(PyObject* sequence, std::vector<int64_t>& found)
{
    PyObject* fast = PySequence_Fast(sequence, "a tensor's sizes and strides are sequences");
    if (fast == nullptr)
        return false;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast); i++)
        found.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast, i)));
    Py_DECREF(fast);
    return PyErr_Occurred() == nullptr;
}

/* (address, bytes, device: -1 for the CPU, size, stride, dtype, offset in elements) */
PyObject* ghost(PyObject*, PyObject* const* args, Py_ssize_t count)
{
    if (count != 7 || !THPDtype_Check(args[5])) {
        PyErr_SetString(PyExc_TypeError, "ghost() takes an address, bytes, a device, sizes, strides, a dtype, an offset");
        return nullptr;
    }
    std::vector<int64_t> size, stride;
    const auto address = PyLong_AsUnsignedLongLong(args[0]);
    const auto nbytes = PyLong_AsSize_t(args[1]);
    const auto device = PyLong_AsLongLong(args[2]);
    const auto offset = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred() != nullptr || !numbers(args[3], size) || !numbers(args[4], stride))
        return nullptr;
    try {
        const auto dtype = c10::scalarTypeToTypeMeta(reinterpret_cast<THPDtype*>(args[5])->scalar_type);
        at::TensorBase made =
            empty_handed(reinterpret_cast<void*>(address), nbytes, device_at(device), dtype);
        made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
        return THPVariable_Wrap(made);
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return nullptr;
    }
}

#include "watch.h"

#include "timeline.h"

PyMethodDef ghost_functions[] = {
    {"ghost", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(ghost)), METH_FASTCALL, nullptr},
    {"storage_of", storage_of, METH_O, nullptr},
    {"counter_of", counter_of, METH_O, nullptr},
};

} // namespace

/* The functions of ghosts.py that C++ has, in its order, and the class in the end.
 *
 * offset, implementation: see `held`.
 * storage, counter: the Python functions that do the same of any tensor.
 * tensor: the class of plain tensors. */
extern "C" PyObject* pg_ghost_functions(
    int64_t offset, uint64_t implementation, PyObject* storage, PyObject* counter, PyObject* tensor)
{
    constexpr Py_ssize_t count = sizeof ghost_functions / sizeof *ghost_functions;
    handle_offset = offset;
    handle_class = implementation;
    others[0] = Py_NewRef(storage);
    others[1] = Py_NewRef(counter);
    others[2] = Py_NewRef(tensor);
    PyObject* made = PyTuple_New(count + 1);
    for (Py_ssize_t i = 0; made != nullptr && i <= count; i++) {
        PyObject* part = i < count ? PyCFunction_New(&ghost_functions[i], nullptr) : timeline_class();
        if (part == nullptr)
            Py_CLEAR(made);
        else
            PyTuple_SET_ITEM(made, i, part);
    }
    return made;
}
