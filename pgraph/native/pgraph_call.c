/* One whole launch in C: what `pgraph.launch.interpreter.Launcher` does, without the interpreter between the steps.
 *
 * call(program, args): are these arguments right for the captured graph? If so take them out of the list,
 * allocate, rebind, launch, free, and return the results; if not, return None and touch nothing.
 *
 * Tensors are read through torch's C shims (the ABI of its ahead-of-time compiled code), made by the same
 * Python callable that generated code uses; memory that no result needs comes from the caching allocator
 * without a tensor around it. No torch, CUDA or driver header is needed: Python hands over addresses.
 *
 * Note [Handles in place]
 * The shims take a pointer to a C++ tensor. torch gives one for a Python object by a list of capsules, which
 * costs more than all the reading. A tensor's Python object holds the C++ one itself, at an offset that is
 * found by looking, once (`pgraph.compat.tensor_layout`). Each use checks that what lies there points to an
 * object of the class that was seen there; where it does not, the capsules serve.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef int32_t (*fn_read)(void *tensor, void *result);
typedef int32_t (*fn_delete)(void *tensor);
typedef int32_t (*fn_alloc)(uint64_t nbytes, void **result);
typedef int32_t (*fn_free)(void *memory);
typedef int64_t (*fn_launch)(const void *exec, void *stream, const uint64_t *bases);
typedef int (*fn_capturing)(void *stream, int *status);

typedef struct { /* a device tensor among the arguments */
    Py_ssize_t position;
    int64_t ndim;
    int64_t *size; /* ndim sizes, then ndim strides, in elements */
    uint64_t mask; /* bits that must be 0 in its address */
} pg_input;

typedef struct { /* another argument, and the value that the code was specialized for */
    Py_ssize_t position;
    PyObject *value;
} pg_other;

typedef struct { /* what a function said of an argument when it was captured */
    Py_ssize_t position;
    PyObject *function, *value;
} pg_trait;

typedef struct {
    int64_t region;
    uint64_t offset; /* bytes from the block's first */
} pg_tenant;

typedef struct {
    int64_t block;
    PyObject *layout; /* (size, stride, dtype) */
    uint64_t nbytes;
    int raw; /* no result lies in it: memory without a tensor */
    Py_ssize_t n_tenants;
    pg_tenant *tenants;
} pg_alloc;

typedef struct {
    Py_ssize_t n_allocs, n_frees, n_releases;
    pg_alloc *allocs;
    void *exec; /* NULL: nothing to launch */
    int64_t *frees, *releases;
} pg_step;

enum { FROM_BLOCK, FROM_BLOCK_VIEW, FROM_INPUT, FROM_INPUT_VIEW, CONSTANT, RESULT, RESULT_VIEW }; /* as in pgraph.launch.interpreter */

typedef struct {
    int source;
    Py_ssize_t index;
    PyObject *constant; /* the value, or the function that makes a view */
    PyObject *rest;     /* its arguments after the owner */
} pg_result;

typedef struct {
    PyObject *spec; /* everything borrowed below is owned by it, and so are the execs */
    Py_ssize_t n_inputs, n_others, n_traits, n_steps, n_results, n_regions, n_blocks;
    pg_input *inputs;
    pg_other *others;
    pg_trait *traits;
    pg_step *steps;
    pg_result *results;
    PyObject *handles_of, *empty, *failed, *current_stream, *current_device, *device;
    PyTypeObject *tensor_type;
    Py_ssize_t tensor_offset; /* 0: not known, see Note [Handles in place] */
    void *tensor_class;
    long device_index;
    fn_read dim, size, stride, data_ptr;
    fn_delete delete_handle;
    fn_alloc raw_alloc;
    fn_free raw_free;
    fn_launch launch;
    fn_capturing capturing;
} pg_program;

typedef struct { /* of one call */
    PyObject **inputs, **tensors; /* tensors: of the blocks, NULL where the memory is raw or not there */
    void **raw;
    uint64_t *bases;
} pg_frame;

static PyObject *name_data_ptr;

/* -- are the arguments right? ---------------------------------------------------------------- */

/* The C++ tensor within a Python object, or NULL where it is not seen to be one. */
static void *handle_in(const pg_program *p, PyObject *object)
{
    if (!p->tensor_offset || !PyObject_TypeCheck(object, p->tensor_type))
        return NULL;
    void **handle = (void **)((char *)object + p->tensor_offset);
    return *handle && *(void **)*handle == p->tensor_class ? handle : NULL;
}

static int reads_as(const pg_program *p, void *handle, const pg_input *in, uint64_t *address)
{
    int64_t ndim, *size, *stride;
    void *data;
    if (p->dim(handle, &ndim) || ndim != in->ndim)
        return 0;
    if (p->size(handle, &size) || p->stride(handle, &stride) || p->data_ptr(handle, &data))
        return 0;
    for (int64_t i = 0; i < ndim; i++)
        if (size[i] != in->size[i] || (stride[i] != in->size[ndim + i] && size[i] > 1))
            return 0;
    *address = (uint64_t)(uintptr_t)data;
    return (*address & in->mask) == 0;
}

/* 1: every trait is as it was; 0: not so; -1: a Python error. Their positions are among the inputs'. */
static int has_traits(const pg_program *p, PyObject *args)
{
    for (Py_ssize_t i = 0; i < p->n_traits; i++) {
        const pg_trait *trait = &p->traits[i];
        PyObject *today = PyObject_CallOneArg(trait->function, PyList_GET_ITEM(args, trait->position));
        if (!today)
            return -1;
        int same = PyObject_RichCompareBool(today, trait->value, Py_EQ);
        Py_DECREF(today);
        if (same <= 0)
            return same;
    }
    return 1;
}

/* `matches` for the tensors, by handles that torch makes. */
static int match_by_capsules(const pg_program *p, PyObject *args, uint64_t *bases)
{
    Py_ssize_t n = PyList_GET_SIZE(args);
    PyObject *tensors = PyList_New(p->n_inputs);
    if (!tensors)
        return -1;
    for (Py_ssize_t i = 0; i < p->n_inputs; i++) {
        if (p->inputs[i].position >= n) {
            Py_DECREF(tensors);
            return 0;
        }
        PyList_SET_ITEM(tensors, i, Py_NewRef(PyList_GET_ITEM(args, p->inputs[i].position)));
    }
    PyObject *handles = PyObject_CallOneArg(p->handles_of, tensors);
    Py_DECREF(tensors);
    if (!handles) { /* something that is no tensor: the path in Python says what */
        PyErr_Clear();
        return 0;
    }
    int right = 1;
    for (Py_ssize_t i = 0; i < p->n_inputs; i++) {
        PyObject *capsule = PyList_GET_ITEM(handles, i);
        void *handle = PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));
        right = right && handle && reads_as(p, handle, &p->inputs[i], &bases[i]);
        if (handle)
            p->delete_handle(handle);
    }
    Py_DECREF(handles);
    return PyErr_Occurred() ? -1 : right ? has_traits(p, args) : 0;
}

/* 1: they are, and `bases` has their addresses; 0: they are not; -1: a Python error. */
static int matches(const pg_program *p, PyObject *args, uint64_t *bases)
{
    Py_ssize_t n = PyList_GET_SIZE(args);
    for (Py_ssize_t i = 0; i < p->n_others; i++) {
        if (p->others[i].position >= n)
            return 0;
        int same = PyObject_RichCompareBool(PyList_GET_ITEM(args, p->others[i].position), p->others[i].value, Py_EQ);
        if (same <= 0)
            return same;
    }
    for (Py_ssize_t i = 0; i < p->n_inputs; i++) {
        if (p->inputs[i].position >= n)
            return 0;
        void *handle = handle_in(p, PyList_GET_ITEM(args, p->inputs[i].position));
        if (!handle)
            return match_by_capsules(p, args, bases);
        if (!reads_as(p, handle, &p->inputs[i], &bases[i]))
            return 0;
    }
    return has_traits(p, args);
}

/* 1: this device is current and nobody captures its current stream; 0: not so; -1: a Python error. */
static int ready(const pg_program *p, void **stream)
{
    PyObject *device = PyObject_CallNoArgs(p->current_device);
    if (!device)
        return -1;
    long index = PyLong_AsLong(device);
    Py_DECREF(device);
    if (index != p->device_index)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *handle = PyObject_CallOneArg(p->current_stream, p->device);
    if (!handle)
        return -1;
    *stream = (void *)(uintptr_t)PyLong_AsUnsignedLongLong(handle);
    Py_DECREF(handle);
    if (PyErr_Occurred())
        return -1;
    int status = 0;
    return p->capturing == NULL || (p->capturing(*stream, &status) == 0 && status == 0);
}

/* -- the steps ------------------------------------------------------------------------------- */

static int address_of(const pg_program *p, PyObject *tensor, uint64_t *address)
{
    void *data, *handle = handle_in(p, tensor);
    if (handle && p->data_ptr(handle, &data) == 0) {
        *address = (uint64_t)(uintptr_t)data;
        return 0;
    }
    PyObject *number = PyObject_CallMethodNoArgs(tensor, name_data_ptr);
    if (!number)
        return -1;
    *address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int allocate(const pg_program *p, const pg_alloc *a, pg_frame *f)
{
    uint64_t address;
    void *memory = NULL;
    if (a->raw && p->raw_alloc(a->nbytes, &memory) == 0) {
        f->raw[a->block] = memory;
        address = (uint64_t)(uintptr_t)memory;
    } else {
        /* Also where raw memory was refused: the framework's own error is the better one. */
        PyObject *tensor = PyObject_Call(p->empty, a->layout, NULL);
        if (!tensor)
            return -1;
        f->tensors[a->block] = tensor;
        if (address_of(p, tensor, &address))
            return -1;
    }
    for (Py_ssize_t i = 0; i < a->n_tenants; i++)
        f->bases[a->tenants[i].region] = address + a->tenants[i].offset;
    return 0;
}

static void drop(const pg_program *p, pg_frame *f, int64_t block)
{
    Py_CLEAR(f->tensors[block]);
    if (f->raw[block]) {
        p->raw_free(f->raw[block]);
        f->raw[block] = NULL;
    }
}

/* Nodes rewritten, or -1 with a Python error; `launched`: how many launches went through. */
static int64_t run_steps(const pg_program *p, pg_frame *f, void *stream, int *launched)
{
    int64_t rewritten = 0;
    for (Py_ssize_t s = 0; s < p->n_steps; s++) {
        const pg_step *step = &p->steps[s];
        for (Py_ssize_t i = 0; i < step->n_allocs; i++)
            if (allocate(p, &step->allocs[i], f))
                return -1;
        if (step->exec) {
            int64_t code;
            /* A launch may wait for room in the device's queue. */
            Py_BEGIN_ALLOW_THREADS
            code = p->launch(step->exec, stream, f->bases);
            Py_END_ALLOW_THREADS
            if (code < 0) {
                PyObject *none = PyObject_CallFunction(p->failed, "LO", (long)-code, *launched ? Py_False : Py_True);
                Py_XDECREF(none); /* it raises */
                if (!PyErr_Occurred())
                    PyErr_SetString(PyExc_SystemError, "a launch failed and nobody said why");
                return -1;
            }
            rewritten += code;
            *launched += 1;
        }
        for (Py_ssize_t i = 0; i < step->n_frees; i++)
            drop(p, f, step->frees[i]);
        for (Py_ssize_t i = 0; i < step->n_releases; i++)
            Py_CLEAR(f->inputs[step->releases[i]]);
    }
    return rewritten;
}

/* `before`: the results up to this one. */
static PyObject *result_of(const pg_frame *f, const pg_result *r, PyObject *before)
{
    if (r->source == CONSTANT)
        return Py_NewRef(r->constant);
    if (r->source == RESULT)
        return Py_NewRef(PyList_GET_ITEM(before, r->index));
    int own = r->source == FROM_BLOCK || r->source == FROM_BLOCK_VIEW;
    PyObject *owner = own ? f->tensors[r->index] : NULL;
    if (r->source == FROM_INPUT || r->source == FROM_INPUT_VIEW)
        owner = f->inputs[r->index];
    if (r->source == RESULT_VIEW)
        owner = PyList_GET_ITEM(before, r->index);
    if (!owner) {
        PyErr_SetString(PyExc_SystemError, "the owner of a result is gone");
        return NULL;
    }
    if (r->source == FROM_BLOCK || r->source == FROM_INPUT)
        return Py_NewRef(owner);
    PyObject *args[4] = {owner};
    Py_ssize_t n = PyTuple_GET_SIZE(r->rest);
    for (Py_ssize_t i = 0; i < n; i++)
        args[i + 1] = PyTuple_GET_ITEM(r->rest, i);
    return PyObject_Vectorcall(r->constant, args, (size_t)n + 1, NULL);
}

static PyObject *results_of(const pg_program *p, const pg_frame *f)
{
    PyObject *list = PyList_New(p->n_results);
    for (Py_ssize_t i = 0; list && i < p->n_results; i++) {
        PyObject *one = result_of(f, &p->results[i], list);
        if (!one)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, one);
    }
    return list;
}

static PyObject *run(const pg_program *p, PyObject *args, pg_frame *f, void *stream)
{
    for (Py_ssize_t i = 0; i < p->n_inputs; i++) {
        f->inputs[i] = Py_NewRef(PyList_GET_ITEM(args, p->inputs[i].position));
        PyList_SetItem(args, p->inputs[i].position, Py_NewRef(Py_None));
    }
    int launched = 0;
    int64_t rewritten = run_steps(p, f, stream, &launched);
    PyObject *results = rewritten < 0 ? NULL : results_of(p, f);
    if (rewritten < 0 && !launched) /* nothing has run: the caller gets its arguments back */
        for (Py_ssize_t i = 0; i < p->n_inputs; i++)
            if (f->inputs[i])
                PyList_SetItem(args, p->inputs[i].position, Py_NewRef(f->inputs[i]));
    PyObject *type, *value, *traceback; /* freeing must not see, or lose, the error */
    PyErr_Fetch(&type, &value, &traceback);
    for (Py_ssize_t i = 0; i < p->n_inputs; i++)
        Py_CLEAR(f->inputs[i]);
    for (Py_ssize_t i = p->n_blocks; i-- > 0;)
        drop(p, f, i);
    PyErr_Restore(type, value, traceback);
    return results ? Py_BuildValue("(NL)", results, (long long)rewritten) : NULL;
}

static const char *CAPSULE = "pgraph.program";

static PyObject *call(PyObject *module, PyObject *const *given, Py_ssize_t n)
{
    (void)module;
    if (n != 2 || !PyList_Check(given[1])) {
        PyErr_SetString(PyExc_TypeError, "call(program, list of arguments)");
        return NULL;
    }
    const pg_program *p = PyCapsule_GetPointer(given[0], CAPSULE);
    if (!p)
        return NULL;
    size_t words = (size_t)(p->n_inputs + 2 * p->n_blocks + p->n_regions);
    void **memory = PyMem_Calloc(words ? words : 1, sizeof(void *));
    if (!memory)
        return PyErr_NoMemory();
    pg_frame f = {(PyObject **)memory, (PyObject **)memory + p->n_inputs, memory + p->n_inputs + p->n_blocks,
                  (uint64_t *)(memory + p->n_inputs + 2 * p->n_blocks)};
    void *stream = NULL;
    int right = matches(p, given[1], f.bases);
    if (right > 0)
        right = ready(p, &stream);
    PyObject *done = right < 0 ? NULL : right ? run(p, given[1], &f, stream) : Py_NewRef(Py_None);
    PyMem_Free(memory);
    return done;
}

/* -- building a program ---------------------------------------------------------------------- */

static void free_program(pg_program *p)
{
    if (!p)
        return;
    for (Py_ssize_t i = 0; p->inputs && i < p->n_inputs; i++)
        PyMem_Free(p->inputs[i].size);
    for (Py_ssize_t s = 0; p->steps && s < p->n_steps; s++) {
        for (Py_ssize_t i = 0; p->steps[s].allocs && i < p->steps[s].n_allocs; i++)
            PyMem_Free(p->steps[s].allocs[i].tenants);
        PyMem_Free(p->steps[s].allocs);
        PyMem_Free(p->steps[s].frees);
        PyMem_Free(p->steps[s].releases);
    }
    PyMem_Free(p->inputs);
    PyMem_Free(p->others);
    PyMem_Free(p->traits);
    PyMem_Free(p->steps);
    PyMem_Free(p->results);
    Py_XDECREF(p->spec);
    PyMem_Free(p);
}

static void free_capsule(PyObject *capsule) { free_program(PyCapsule_GetPointer(capsule, CAPSULE)); }

static void *zeroed(Py_ssize_t n, size_t size)
{
    void *memory = PyMem_Calloc(n ? (size_t)n : 1, size);
    if (!memory)
        PyErr_NoMemory();
    return memory;
}

static int64_t *numbers(PyObject *tuple, Py_ssize_t *n)
{
    *n = PyTuple_Size(tuple);
    int64_t *found = *n < 0 ? NULL : zeroed(*n, sizeof(int64_t));
    for (Py_ssize_t i = 0; found && i < *n; i++)
        found[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    return found;
}

static int read_inputs(pg_program *p, PyObject *inputs, PyObject *others, PyObject *traits)
{
    if (!(p->inputs = zeroed(p->n_inputs = PyTuple_Size(inputs), sizeof(pg_input))))
        return -1;
    for (Py_ssize_t i = 0; i < p->n_inputs; i++) {
        pg_input *in = &p->inputs[i];
        PyObject *layout; /* sizes, then strides */
        unsigned long long mask;
        Py_ssize_t n;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(inputs, i), "nOK", &in->position, &layout, &mask))
            return -1;
        if (!(in->size = numbers(layout, &n)))
            return -1;
        in->ndim = n / 2;
        in->mask = mask;
    }
    if (!(p->others = zeroed(p->n_others = PyTuple_Size(others), sizeof(pg_other))))
        return -1;
    for (Py_ssize_t i = 0; i < p->n_others; i++)
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(others, i), "nO", &p->others[i].position, &p->others[i].value))
            return -1;
    if (!(p->traits = zeroed(p->n_traits = PyTuple_Size(traits), sizeof(pg_trait))))
        return -1;
    for (Py_ssize_t i = 0; i < p->n_traits; i++)
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(traits, i), "nOO", &p->traits[i].position, &p->traits[i].function,
                              &p->traits[i].value))
            return -1;
    return 0;
}

static int read_alloc(pg_alloc *a, PyObject *spec)
{
    PyObject *tenants;
    long long block;
    unsigned long long nbytes;
    if (!PyArg_ParseTuple(spec, "LO!KpO!", &block, &PyTuple_Type, &a->layout, &nbytes, &a->raw, &PyTuple_Type,
                          &tenants))
        return -1;
    a->block = block;
    a->nbytes = nbytes;
    if (!(a->tenants = zeroed(a->n_tenants = PyTuple_Size(tenants), sizeof(pg_tenant))))
        return -1;
    for (Py_ssize_t i = 0; i < a->n_tenants; i++) {
        long long region, offset;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tenants, i), "LL", &region, &offset))
            return -1;
        a->tenants[i] = (pg_tenant){region, (uint64_t)offset};
    }
    return 0;
}

static int read_steps(pg_program *p, PyObject *steps)
{
    if (!(p->steps = zeroed(p->n_steps = PyTuple_Size(steps), sizeof(pg_step))))
        return -1;
    for (Py_ssize_t s = 0; s < p->n_steps; s++) {
        pg_step *step = &p->steps[s];
        PyObject *allocs, *frees, *releases;
        unsigned long long exec;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(steps, s), "O!KO!O!", &PyTuple_Type, &allocs, &exec, &PyTuple_Type,
                              &frees, &PyTuple_Type, &releases))
            return -1;
        step->exec = (void *)(uintptr_t)exec;
        if (!(step->frees = numbers(frees, &step->n_frees)) || !(step->releases = numbers(releases, &step->n_releases)))
            return -1;
        if (!(step->allocs = zeroed(step->n_allocs = PyTuple_Size(allocs), sizeof(pg_alloc))))
            return -1;
        for (Py_ssize_t i = 0; i < step->n_allocs; i++)
            if (read_alloc(&step->allocs[i], PyTuple_GET_ITEM(allocs, i)))
                return -1;
    }
    return 0;
}

static int read_results(pg_program *p, PyObject *results)
{
    if (!(p->results = zeroed(p->n_results = PyTuple_Size(results), sizeof(pg_result))))
        return -1;
    for (Py_ssize_t i = 0; i < p->n_results; i++) {
        pg_result *r = &p->results[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(results, i), "inOO!", &r->source, &r->index, &r->constant,
                              &PyTuple_Type, &r->rest))
            return -1;
        int again = r->source == RESULT || r->source == RESULT_VIEW;
        if (again && (r->index < 0 || r->index >= i)) {
            PyErr_SetString(PyExc_ValueError, "a result can only stand on an earlier one");
            return -1;
        }
        if (PyTuple_GET_SIZE(r->rest) > 3) {
            PyErr_SetString(PyExc_ValueError, "a view takes at most three arguments after its owner");
            return -1;
        }
    }
    return 0;
}

/* program(inputs, others, traits, steps, results, (regions, blocks), callables, addresses, tensor, device, keep) */
static PyObject *program(PyObject *module, PyObject *spec)
{
    (void)module;
    PyObject *inputs, *others, *traits, *steps, *results, *keep, *device;
    unsigned long long at[9], tensor_class;
    pg_program *p = zeroed(1, sizeof *p);
    if (!p)
        return NULL;
    p->spec = Py_NewRef(spec);
    if (!PyArg_ParseTuple(spec, "O!O!O!O!O!(nn)(OOOOO)(KKKKKKKKK)(O!nK)OO", &PyTuple_Type, &inputs, &PyTuple_Type, &others,
                          &PyTuple_Type, &traits, &PyTuple_Type, &steps, &PyTuple_Type, &results, &p->n_regions,
                          &p->n_blocks, &p->handles_of, &p->empty, &p->failed, &p->current_stream, &p->current_device,
                          &at[0], &at[1], &at[2], &at[3], &at[4], &at[5], &at[6], &at[7], &at[8], &PyType_Type,
                          &p->tensor_type, &p->tensor_offset, &tensor_class, &device, &keep) ||
        read_inputs(p, inputs, others, traits) || read_steps(p, steps) || read_results(p, results)) {
        free_program(p);
        return NULL;
    }
    p->tensor_class = (void *)(uintptr_t)tensor_class;
    p->device = device;
    p->device_index = PyLong_AsLong(device);
    p->dim = (fn_read)(uintptr_t)at[0];
    p->size = (fn_read)(uintptr_t)at[1];
    p->stride = (fn_read)(uintptr_t)at[2];
    p->data_ptr = (fn_read)(uintptr_t)at[3];
    p->delete_handle = (fn_delete)(uintptr_t)at[4];
    p->raw_alloc = (fn_alloc)(uintptr_t)at[5];
    p->raw_free = (fn_free)(uintptr_t)at[6];
    p->launch = (fn_launch)(uintptr_t)at[7];
    p->capturing = (fn_capturing)(uintptr_t)at[8];
    PyObject *capsule = PyErr_Occurred() ? NULL : PyCapsule_New(p, CAPSULE, free_capsule);
    if (!capsule)
        free_program(p);
    return capsule;
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, "call(program, args): (results, rewritten) or None"},
    {"program", program, METH_VARARGS, "program(...): what `call` runs"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_pgraph_call", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pgraph_call(void)
{
    name_data_ptr = PyUnicode_InternFromString("data_ptr");
    return name_data_ptr ? PyModule_Create(&definition) : NULL;
}
