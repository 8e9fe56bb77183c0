/* A part of `launch.c`: reads the dataclasses of a program, once. */

static void free_program(pg_program *p)
{
    if (!p)
        return;
    for (Py_ssize_t i = 0; !p->guards && p->inputs && i < p->n_inputs; i++)
        PyMem_Free(p->inputs[i].size);
    for (Py_ssize_t c = 0; p->chunks && c < p->n_chunks; c++) {
        for (Py_ssize_t i = 0; p->chunks[c].allocs && i < p->chunks[c].n_allocs; i++) {
            PyMem_Free(p->chunks[c].allocs[i].tenants);
            PyMem_Free(p->chunks[c].allocs[i].made.layout);
        }
        PyMem_Free(p->chunks[c].allocs);
        PyMem_Free(p->chunks[c].frees);
        PyMem_Free(p->chunks[c].releases);
    }
    for (Py_ssize_t i = 0; p->results && i < p->n_results; i++)
        PyMem_Free(p->results[i].made.layout);
    if (!p->guards) {
        PyMem_Free(p->inputs);
        PyMem_Free(p->values);
        PyMem_Free(p->traits);
    }
    Py_XDECREF(p->guards);
    PyMem_Free(p->chunks);
    PyMem_Free(p->results);
    Py_XDECREF(p->source);
    Py_XDECREF(p->calls);
    PyMem_Free(p);
}

static void free_capsule(PyObject *capsule)
{
    free_program(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
}

static void free_set(pg_set *set)
{
    if (!set)
        return;
    PyMem_Free(set->programs);
    PyMem_Free(set->parts);
    PyMem_Free(set->keys);
    PyMem_Free(set->heads);
    PyMem_Free(set->next);
    PyMem_Free(set->spare);
    Py_XDECREF(set->owners);
    PyMem_Free(set);
}

static void free_set_capsule(PyObject *capsule) { free_set(PyCapsule_GetPointer(capsule, SET)); }

static void *zeroed(Py_ssize_t n, size_t size)
{
    void *memory = PyMem_Calloc(n ? (size_t)n : 1, size);
    if (!memory)
        PyErr_NoMemory();
    return memory;
}

static int64_t *numbers(PyObject *tuple, Py_ssize_t *n)
{
    int64_t *found = zeroed(*n = PyTuple_GET_SIZE(tuple), sizeof(int64_t));
    for (Py_ssize_t i = 0; found && i < *n; i++)
        found[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    if (PyErr_Occurred()) {
        PyMem_Free(found);
        return NULL;
    }
    return found;
}

/* 0 if all of these are in [0, end). */
static int check_range(const int64_t *found, Py_ssize_t n, Py_ssize_t end)
{
    for (Py_ssize_t i = 0; i < n; i++)
        if (found[i] < 0 || found[i] >= end)
            return -1;
    return 0;
}

/* A name, which is a literal, as Python has it: to make it anew takes twice as long as all else that `field` does. */
static PyObject *interned(const char *name)
{
    enum { ROOM = 256 };
    static struct {
        const char *name;
        PyObject *text;
    } known[ROOM];
    for (uintptr_t i = (uintptr_t)name, tried = 0; tried < ROOM; i++, tried++) {
        if (!known[i % ROOM].name) {
            PyObject *text = PyUnicode_InternFromString(name);
            if (text) {
                known[i % ROOM].name = name;
                known[i % ROOM].text = text;
            }
            return text;
        }
        if (known[i % ROOM].name == name)
            return known[i % ROOM].text;
    }
    PyErr_SetString(PyExc_SystemError, "launch_read.h reads more names than it has room for");
    return NULL;
}

/* A field of an immutable object. Borrowed: the object owns it for as long as the program lives. */
static PyObject *field(PyObject *object, const char *name)
{
    PyObject *text = object ? interned(name) : NULL, *value = text ? PyObject_GetAttr(object, text) : NULL;
    Py_XDECREF(value);
    return value;
}

/* The same, and it is a tuple. */
static PyObject *tuple_field(PyObject *object, const char *name)
{
    PyObject *value = field(object, name);
    if (value && !PyTuple_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s of a launch program must be a tuple", name);
        return NULL;
    }
    return value;
}

/* The same, and it is a number: -1 with a Python error if not. None is 0. */
static long long number_field(PyObject *object, const char *name)
{
    PyObject *value = field(object, name);
    return !value ? -1 : value == Py_None ? 0 : PyLong_AsLongLong(value);
}

static void *address_field(PyObject *object, const char *name)
{
    PyObject *value = field(object, name);
    return !value || value == Py_None ? NULL : (void *)(uintptr_t)PyLong_AsUnsignedLongLong(value);
}

/* Sizes, then strides. NULL with an error if these are no tuples of one length. */
static int64_t *layout_of(PyObject *size, PyObject *stride)
{
    if (!PyTuple_Check(size) || !PyTuple_Check(stride) || PyTuple_GET_SIZE(size) != PyTuple_GET_SIZE(stride)) {
        PyErr_SetString(PyExc_ValueError, "a layout has as many strides as sizes");
        return NULL;
    }
    PyObject *both = PySequence_Concat(size, stride);
    Py_ssize_t n;
    int64_t *found = both ? numbers(both, &n) : NULL;
    Py_XDECREF(both);
    return found;
}

static int read_tensor_guard(pg_input *in, PyObject *guard)
{
    PyObject *size = tuple_field(guard, "size"), *stride = tuple_field(guard, "stride");
    if (!size || !stride)
        return -1;
    in->position = (Py_ssize_t)number_field(guard, "position");
    in->mask = (uint64_t)number_field(guard, "mask");
    in->ndim = PyTuple_GET_SIZE(size);
    if (PyErr_Occurred() || in->position < 0)
        return -1;
    return (in->size = layout_of(size, stride)) ? 0 : -1;
}

static int read_guards(pg_program *p, PyObject *guards)
{
    PyObject *tensors = tuple_field(guards, "tensors"), *values = tuple_field(guards, "values");
    PyObject *traits = tuple_field(guards, "traits");
    if (!tensors || !values || !traits)
        return -1;
    if (!(p->inputs = zeroed(p->n_inputs = PyTuple_GET_SIZE(tensors), sizeof(pg_input))) ||
        !(p->values = zeroed(p->n_values = PyTuple_GET_SIZE(values), sizeof(pg_value))) ||
        !(p->traits = zeroed(p->n_traits = PyTuple_GET_SIZE(traits), sizeof(pg_trait))))
        return -1;
    for (Py_ssize_t i = 0; i < p->n_inputs; i++)
        if (read_tensor_guard(&p->inputs[i], PyTuple_GET_ITEM(tensors, i)))
            return -1;
    for (Py_ssize_t i = 0; i < p->n_values; i++) {
        PyObject *guard = PyTuple_GET_ITEM(values, i);
        p->values[i] = (pg_value){(Py_ssize_t)number_field(guard, "position"), field(guard, "value")};
    }
    for (Py_ssize_t i = 0; i < p->n_traits; i++) {
        PyObject *guard = PyTuple_GET_ITEM(traits, i);
        p->traits[i] =
            (pg_trait){(Py_ssize_t)number_field(guard, "position"), field(guard, "trait"), field(guard, "value")};
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* `words`: of `Pairs`, as `pg_tenant` has them. */
static int read_tenants(const pg_program *p, pg_alloc *a, PyObject *words)
{
    Py_buffer view;
    if (!words || PyObject_GetBuffer(words, &view, PyBUF_SIMPLE))
        return -1;
    a->n_tenants = view.len / (Py_ssize_t)sizeof(pg_tenant);
    if ((a->tenants = zeroed(a->n_tenants, sizeof(pg_tenant))))
        memcpy(a->tenants, view.buf, (size_t)a->n_tenants * sizeof(pg_tenant));
    int odd = view.len % (Py_ssize_t)sizeof(pg_tenant) != 0;
    PyBuffer_Release(&view);
    for (Py_ssize_t i = 0; a->tenants && i < a->n_tenants; i++)
        odd |= a->tenants[i].region < 0 || a->tenants[i].region >= p->n_regions;
    return a->tenants && !odd ? 0 : -1;
}

/* Those of a capsule that `guards` made of the very same object. It is kept: hundreds of inputs of each size. */
static int take_guards(pg_program *p, PyObject *guards, PyObject *capsule)
{
    const pg_program *read = PyCapsule_IsValid(capsule, GUARDS_ONLY) ? PyCapsule_GetPointer(capsule, GUARDS_ONLY) : NULL;
    if (!read || read->source != guards)
        return read_guards(p, guards);
    p->guards = Py_NewRef(capsule);
    p->n_inputs = read->n_inputs, p->n_values = read->n_values, p->n_traits = read->n_traits;
    p->inputs = read->inputs, p->values = read->values, p->traits = read->traits;
    return 0;
}

static int read_alloc(const pg_program *p, pg_alloc *a, PyObject *spec)
{
    if (read_tenants(p, a, field(field(spec, "tenants"), "words")))
        return -1;
    a->block = number_field(spec, "block");
    a->raw = (uint64_t)number_field(spec, "raw");
    if (PyErr_Occurred() || a->block < 0 || a->block >= p->n_blocks)
        return -1;
    a->size = tuple_field(spec, "size");
    a->stride = tuple_field(spec, "stride");
    a->dtype = field(spec, "dtype");
    if (PyErr_Occurred())
        return -1;
    a->number = p->number_of ? p->number_of(a->dtype) : -1;
    a->made.ndim = PyTuple_GET_SIZE(a->size);
    if (a->number >= 0 && !(a->made.layout = layout_of(a->size, a->stride)))
        return -1;
    return 0;
}

static int read_chunk(const pg_program *p, pg_chunk *chunk, PyObject *spec)
{
    PyObject *allocate = tuple_field(spec, "allocate"), *frees = tuple_field(spec, "free");
    PyObject *releases = tuple_field(spec, "release"), *recipe = field(spec, "recipe");
    if (!allocate || !frees || !releases || !recipe)
        return -1;
    if (recipe != Py_None && !(chunk->recipe = address_field(recipe, "entry"))) {
        PyErr_SetString(PyExc_ValueError, "a recipe cannot be launched from C: it has no entry");
        return -1;
    }
    if (!(chunk->frees = numbers(frees, &chunk->n_frees)) ||
        !(chunk->releases = numbers(releases, &chunk->n_releases)) ||
        !(chunk->allocs = zeroed(chunk->n_allocs = PyTuple_GET_SIZE(allocate), sizeof(pg_alloc))))
        return -1;
    if (check_range(chunk->frees, chunk->n_frees, p->n_blocks) ||
        check_range(chunk->releases, chunk->n_releases, p->n_inputs))
        return -1;
    for (Py_ssize_t i = 0; i < chunk->n_allocs; i++)
        if (read_alloc(p, &chunk->allocs[i], PyTuple_GET_ITEM(allocate, i)))
            return -1;
    return 0;
}

static int read_chunks(pg_program *p, PyObject *chunks)
{
    if (!chunks || !(p->chunks = zeroed(p->n_chunks = PyTuple_GET_SIZE(chunks), sizeof(pg_chunk))))
        return -1;
    for (Py_ssize_t c = 0; c < p->n_chunks; c++)
        if (read_chunk(p, &p->chunks[c], PyTuple_GET_ITEM(chunks, c)))
            return -1;
    return 0;
}

/* Of a result within a block: `view` of plain values. Its block begins where its storage does. */
static int read_view(const pg_program *p, pg_result *r)
{
    PyObject *spec;
    long long offset;
    if (!PyArg_ParseTuple(r->args, "OL", &spec, &offset))
        return -1;
    PyObject *size = tuple_field(spec, "size"), *stride = tuple_field(spec, "stride"), *dtype = field(spec, "dtype");
    PyObject *conj = field(spec, "conj"), *neg = field(spec, "neg");
    long long own = number_field(spec, "offset"), unit = number_field(dtype, "itemsize");
    if (PyErr_Occurred() || unit <= 0)
        return -1;
    r->number = p->number_of(dtype);
    if (r->number < 0 || conj != Py_False || neg != Py_False || (offset + own) % unit)
        return 0;
    r->offset = (offset + own) / unit;
    if (!(r->made.layout = layout_of(size, stride)))
        return -1;
    r->made.ndim = PyTuple_GET_SIZE(size);
    return 0;
}

/* Of a result that `tensors.cpp` can make. */
static int read_alias(const pg_program *p, pg_result *r)
{
    r->number = -1;
    if (p->make_alias && p->number_of && r->make == p->view && r->source == BLOCK)
        return read_view(p, r);
    if (!p->make_alias || r->make != p->reinterpret)
        return 0;
    PyObject *size, *stride;
    long long offset;
    if (!PyArg_ParseTuple(r->args, "OOL", &size, &stride, &offset))
        return -1;
    r->offset = offset;
    if (!(r->made.layout = layout_of(size, stride)))
        return -1;
    r->made.ndim = PyTuple_GET_SIZE(size);
    return 0;
}

static int read_results(pg_program *p, PyObject *results)
{
    if (!results || !(p->results = zeroed(p->n_results = PyTuple_GET_SIZE(results), sizeof(pg_result))))
        return -1;
    for (Py_ssize_t i = 0; i < p->n_results; i++) {
        pg_result *r = &p->results[i];
        PyObject *spec = PyTuple_GET_ITEM(results, i);
        r->source = (int)number_field(spec, "source");
        r->index = (Py_ssize_t)number_field(spec, "index");
        r->constant = field(spec, "constant");
        r->make = field(spec, "make");
        r->args = tuple_field(spec, "args");
        if (PyErr_Occurred())
            return -1;
        Py_ssize_t ends[] = {1, p->n_blocks, p->n_inputs, i};
        if (r->source < CONSTANT || r->source > RESULT || r->index < 0 || r->index >= ends[r->source]) {
            PyErr_SetString(PyExc_ValueError, "a result stands on a block, an input or an earlier result");
            return -1;
        }
        if (PyTuple_GET_SIZE(r->args) > 3) {
            PyErr_SetString(PyExc_ValueError, "a view takes at most three arguments after its owner");
            return -1;
        }
        if (read_alias(p, r))
            return -1;
    }
    return 0;
}

static int read_calls(pg_program *p, PyObject *calls)
{
    PyObject *device = field(calls, "device");
    p->empty = field(device, "empty");
    p->failed = field(device, "failed");
    p->current_stream = field(device, "current_stream");
    p->current_device = field(device, "current_device");
    p->device = field(device, "index");
    p->device_index = p->device ? PyLong_AsLong(p->device) : -1;
    p->raw_alloc = (fn_alloc)address_field(device, "raw_alloc");
    p->raw_free = (fn_free)address_field(device, "raw_free");
    p->capturing = (fn_capturing)address_field(device, "capturing");
    p->workspace_of = (fn_workspace)address_field(device, "workspace");
    p->no_workspace = field(device, "no_workspace");
    p->made_on = number_field(device, "made_on");
    p->number_of = (fn_number)address_field(calls, "number_of");
    p->make_tensor = (fn_make)address_field(calls, "make_tensor");
    p->make_alias = (fn_alias)address_field(calls, "make_alias");
    p->reinterpret = field(calls, "reinterpret");
    p->view = field(calls, "view");
    p->handles_of = field(calls, "handles_of");
    p->dim = (fn_read)address_field(calls, "dim");
    p->size = (fn_read)address_field(calls, "size");
    p->stride = (fn_read)address_field(calls, "stride");
    p->data_ptr = (fn_read)address_field(calls, "data_ptr");
    p->delete_handle = (fn_delete)address_field(calls, "delete_handle");
    p->launch = (fn_launch)address_field(calls, "launch");
    p->tensor_type = (PyTypeObject *)field(calls, "tensor_type");
    p->tensor_offset = (Py_ssize_t)number_field(calls, "tensor_offset");
    p->tensor_class = address_field(calls, "tensor_class");
    return PyErr_Occurred() ? -1 : 0;
}

static int read_workspace(pg_program *p, PyObject *lent)
{
    long long region = -1;
    unsigned long long nbytes = 0;
    if (!lent || (lent != Py_None && !PyArg_ParseTuple(lent, "LK", &region, &nbytes)))
        return -1;
    p->workspace = region;
    p->workspace_nbytes = nbytes;
    return lent == Py_None || (region >= 0 && region < p->n_regions && p->workspace_of) ? 0 : -1;
}
