/* One whole launch in C: runs the same `pgraph.launch.program.Program` as `pgraph.launch.interpreter`.
 *
 * program(Program, Calls) reads the dataclasses once, and programs(parts, keys, those of a partition) lays out
 * which of them are for which sizes, as `pgraph.launch.lookup` says. call(programs, args) looks for the first
 * program whose guards hold for these arguments. If there is one it takes them out of the list, allocates,
 * rebinds, launches, frees, and returns (results, rewritten nodes, index of the program); if not, it returns
 * None and has touched nothing.
 *
 * guards(Guards, Calls) reads guards alone. addresses(guards or program, args) is `Guards.addresses`.
 *
 * Tensors are read through torch's C shims (the ABI of its ahead-of-time compiled code), made by `tensors.cpp`
 * or, where that is not there or declines, by the same Python callables that generated code uses; memory that
 * no result needs comes from the caching allocator without a tensor around it. No torch, CUDA or driver header
 * is needed here: Python hands over addresses.
 *
 * Note [Handles in place]
 * The shims take a pointer to a C++ tensor. torch gives one for a Python object by a list of capsules, which
 * costs more than all the reading. A tensor's Python object holds the C++ one itself, at an offset that is
 * found by looking, once (`pgraph.compat.tensor_layout`). Each use checks that what lies there points to an
 * object of the class that was seen there; where it does not, the capsules serve.
 *
 * time_calls(program, on) starts to add up where the nanoseconds of the following calls go, or stops and
 * returns them, in the order of PHASES.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef int32_t (*fn_read)(void *tensor, void *result);
typedef int32_t (*fn_delete)(void *tensor);
typedef int32_t (*fn_alloc)(uint64_t nbytes, void **result);
typedef int32_t (*fn_free)(void *memory);
typedef int64_t (*fn_launch)(const void *exec, void *stream, const uint64_t *bases);
typedef int (*fn_capturing)(void *stream, int *status);
typedef uint64_t (*fn_workspace)(void *stream, uint64_t nbytes);
typedef int64_t (*fn_number)(PyObject *dtype);
typedef PyObject *(*fn_make)(int64_t ndim, const int64_t *layout, int64_t dtype, int64_t device, uint64_t *address);
typedef PyObject *(*fn_alias)(const void *owner, int64_t ndim, const int64_t *layout, int64_t offset);

typedef struct { /* a device tensor among the arguments */
    Py_ssize_t position;
    int64_t ndim;
    int64_t *size; /* ndim sizes, then ndim strides, in elements */
    uint64_t mask; /* bits that must be 0 in its address */
} pg_input;

typedef struct { /* a number, and the value that the code was specialized for */
    Py_ssize_t position;
    PyObject *value;
} pg_value;

typedef struct { /* what a function said of an argument when it was captured */
    Py_ssize_t position;
    PyObject *function, *value;
} pg_trait;

typedef struct {
    int64_t region;
    uint64_t offset; /* bytes from the block's first */
} pg_tenant;

typedef struct { /* of a tensor that `tensors.cpp` can make */
    Py_ssize_t ndim;
    int64_t *layout; /* ndim sizes, then ndim strides, in elements; NULL: Python makes it */
} pg_layout;

typedef struct {
    int64_t block;
    PyObject *size, *stride, *dtype;
    pg_layout made;
    int64_t number; /* of the dtype */
    uint64_t raw; /* bytes, where no result lies in it: memory without a tensor; else 0 */
    Py_ssize_t n_tenants;
    pg_tenant *tenants;
} pg_alloc;

typedef struct {
    Py_ssize_t n_allocs, n_frees, n_releases;
    pg_alloc *allocs;
    void *exec; /* NULL: nothing to launch */
    int64_t *frees, *releases;
} pg_chunk;

enum { CONSTANT, BLOCK, INPUT, RESULT }; /* `Source` of pgraph.launch.program, which checks them */

typedef struct {
    int source;
    Py_ssize_t index;
    PyObject *constant;
    PyObject *make; /* Py_None: the owner itself */
    PyObject *args; /* of `make`, after the owner */
    pg_layout made; /* where `make` is `reinterpret` */
    int64_t offset; /* likewise: elements after the owner's first */
} pg_result;

enum { GUARDS, ALLOCATE, LAUNCH, FREE, RESULTS, N_PHASES };

typedef struct {
    PyObject *source, *calls; /* everything borrowed below is owned by these, and so are the execs */
    Py_ssize_t n_inputs, n_values, n_traits, n_chunks, n_results, n_regions, n_blocks;
    Py_ssize_t suspect; /* the input whose guard failed last: it is looked at first */
    pg_input *inputs;
    pg_value *values;
    pg_trait *traits;
    pg_chunk *chunks;
    pg_result *results;
    PyObject *handles_of, *empty, *failed, *no_workspace, *current_stream, *current_device, *device;
    int64_t workspace; /* its region; -1: there is none */
    uint64_t workspace_nbytes;
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
    fn_workspace workspace_of;
    fn_number number_of; /* NULL, and so are the next two: there is no `tensors.cpp` */
    fn_make make_tensor;
    fn_alias make_alias;
    int64_t made_on; /* the device, as `make_tensor` takes it */
    PyObject *reinterpret;
    int timed;
    uint64_t spent[N_PHASES]; /* nanoseconds, since timing was switched on */
} pg_program;

enum { VALUE, SIZE, STRIDE }; /* `Number` of pgraph.launch.lookup, which is checked */

typedef struct { /* `Part` of pgraph.launch.lookup */
    int number;
    Py_ssize_t position, dim;
} pg_part;

enum { MOST_PARTS = 16 }; /* of a key; programs that further ones would tell apart are tried in turn */

typedef struct { /* those of one partition, by their sizes */
    PyObject *owners; /* of the programs */
    Py_ssize_t n, n_parts;
    pg_program **programs;
    pg_part *parts;
    int64_t *keys; /* n_parts for each program */
    Py_ssize_t *heads, *next; /* lists of programs whose keys have one hash, in order; -1: the end */
    uint64_t mask; /* of the hashes */
} pg_set;

typedef struct { /* of one call */
    PyObject **inputs, **tensors; /* tensors: of the blocks, NULL where the memory is raw or not there */
    void **raw;
    uint64_t *bases;
} pg_frame;

static PyObject *name_data_ptr;

static uint64_t now(const pg_program *p)
{
    struct timespec t;
    if (!p->timed || clock_gettime(CLOCK_MONOTONIC, &t))
        return 0;
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* What has passed since `mark` went into this phase; the next one begins. */
static void spend(pg_program *p, int phase, uint64_t *mark)
{
    if (!p->timed)
        return;
    uint64_t today = now(p);
    p->spent[phase] += today - *mark;
    *mark = today;
}

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

/* 1: this input is, and `bases` has its address; 0: it is not; -1: it cannot be read in place. */
static int input_matches(const pg_program *p, PyObject *args, Py_ssize_t i, uint64_t *bases)
{
    if (p->inputs[i].position >= PyList_GET_SIZE(args))
        return 0;
    void *handle = handle_in(p, PyList_GET_ITEM(args, p->inputs[i].position));
    return handle ? reads_as(p, handle, &p->inputs[i], &bases[i]) : -1;
}

/* 1: they are, and `bases` has their addresses; 0: they are not; -1: a Python error.
 *
 * Where several programs are tried, most inputs (the parameters) are alike in all of them. The guard that
 * failed at the last try is likely to fail again, so it comes first. */
static int matches(pg_program *p, PyObject *args, uint64_t *bases)
{
    Py_ssize_t n = PyList_GET_SIZE(args);
    for (Py_ssize_t i = 0; i < p->n_values; i++) {
        if (p->values[i].position >= n)
            return 0;
        int same = PyObject_RichCompareBool(PyList_GET_ITEM(args, p->values[i].position), p->values[i].value, Py_EQ);
        if (same <= 0)
            return same;
    }
    int right = p->n_inputs ? input_matches(p, args, p->suspect, bases) : 1;
    for (Py_ssize_t i = 0; right > 0 && i < p->n_inputs; i++) {
        right = input_matches(p, args, i, bases);
        if (right == 0)
            p->suspect = i;
    }
    if (right < 0)
        return match_by_capsules(p, args, bases);
    return right ? has_traits(p, args) : 0;
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

/* -- the chunks ------------------------------------------------------------------------------ */

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
    if (a->raw && p->raw_alloc(a->raw, &memory) == 0) {
        f->raw[a->block] = memory;
        address = (uint64_t)(uintptr_t)memory;
    } else {
        /* Python's function comes last, also where memory was refused: the framework's own error is the better
         * one. */
        PyObject *layout[] = {a->size, a->stride, a->dtype}, *tensor = NULL;
        if (a->made.layout)
            tensor = p->make_tensor(a->made.ndim, a->made.layout, a->number, p->made_on, &address);
        if (!tensor) {
            tensor = PyObject_Vectorcall(p->empty, layout, 3, NULL);
            if (!tensor)
                return -1;
            if (address_of(p, tensor, &address)) {
                Py_DECREF(tensor);
                return -1;
            }
        }
        f->tensors[a->block] = tensor;
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

/* Has the workspace's slots take today's address. It is asked for at each launch: others may drop it. */
static int bind_workspace(const pg_program *p, pg_frame *f, void *stream)
{
    uint64_t address = p->workspace_of(stream, p->workspace_nbytes);
    if (!address) {
        PyObject *none = PyObject_CallFunction(p->no_workspace, "K", (unsigned long long)p->workspace_nbytes);
        Py_XDECREF(none); /* it raises */
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_SystemError, "there is no workspace and nobody said why");
        return -1;
    }
    f->bases[p->workspace] = address;
    return 0;
}

/* Nodes rewritten, or -1 with a Python error; `launched`: how many launches went through. */
static int64_t run_chunks(pg_program *p, pg_frame *f, void *stream, int *launched, uint64_t *mark)
{
    int64_t rewritten = 0;
    for (Py_ssize_t c = 0; c < p->n_chunks; c++) {
        const pg_chunk *chunk = &p->chunks[c];
        for (Py_ssize_t i = 0; i < chunk->n_allocs; i++)
            if (allocate(p, &chunk->allocs[i], f))
                return -1;
        spend(p, ALLOCATE, mark);
        if (chunk->exec) {
            int64_t code;
            if (p->workspace >= 0 && bind_workspace(p, f, stream))
                return -1;
            /* A launch may wait for room in the device's queue. */
            Py_BEGIN_ALLOW_THREADS
            code = p->launch(chunk->exec, stream, f->bases);
            Py_END_ALLOW_THREADS
            if (code < 0) {
                PyObject *none = PyObject_CallFunction(p->failed, "L", (long long)-code);
                Py_XDECREF(none); /* it raises */
                if (!PyErr_Occurred())
                    PyErr_SetString(PyExc_SystemError, "a launch failed and nobody said why");
                return -1;
            }
            rewritten += code;
            *launched += 1;
        }
        spend(p, LAUNCH, mark);
        for (Py_ssize_t i = 0; i < chunk->n_frees; i++)
            drop(p, f, chunk->frees[i]);
        for (Py_ssize_t i = 0; i < chunk->n_releases; i++)
            Py_CLEAR(f->inputs[chunk->releases[i]]);
        spend(p, FREE, mark);
    }
    return rewritten;
}

/* `before`: the results up to this one. */
static PyObject *result_of(const pg_program *p, const pg_frame *f, const pg_result *r, PyObject *before)
{
    if (r->source == CONSTANT)
        return Py_NewRef(r->constant);
    PyObject *owner = r->source == BLOCK ? f->tensors[r->index]
                      : r->source == INPUT ? f->inputs[r->index]
                                           : PyList_GET_ITEM(before, r->index);
    if (!owner) {
        PyErr_SetString(PyExc_SystemError, "the owner of a result is gone");
        return NULL;
    }
    if (r->make == Py_None)
        return Py_NewRef(owner);
    void *handle = r->made.layout ? handle_in(p, owner) : NULL;
    PyObject *made = handle ? p->make_alias(handle, r->made.ndim, r->made.layout, r->offset) : NULL;
    if (made)
        return made;
    PyObject *args[4] = {owner};
    Py_ssize_t n = PyTuple_GET_SIZE(r->args);
    for (Py_ssize_t i = 0; i < n; i++)
        args[i + 1] = PyTuple_GET_ITEM(r->args, i);
    return PyObject_Vectorcall(r->make, args, (size_t)n + 1, NULL);
}

static PyObject *results_of(const pg_program *p, const pg_frame *f)
{
    PyObject *list = PyList_New(p->n_results);
    for (Py_ssize_t i = 0; list && i < p->n_results; i++) {
        PyObject *one = result_of(p, f, &p->results[i], list);
        if (!one)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, one);
    }
    return list;
}

/* Has the current error say which program failed, and whether a part of it had run. */
static void note_failure(Py_ssize_t index, int ran)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *facts = Py_BuildValue("(nO)", index, ran ? Py_True : Py_False);
    if (!facts || !value || PyObject_SetAttrString(value, "pgraph_launch", facts))
        PyErr_Clear(); /* an exception that takes no attributes is none of a launch */
    Py_XDECREF(facts);
    PyErr_Restore(type, value, traceback);
}

static PyObject *run(pg_program *p, Py_ssize_t index, PyObject *args, pg_frame *f, void *stream, uint64_t *mark)
{
    for (Py_ssize_t i = 0; i < p->n_inputs; i++) {
        f->inputs[i] = Py_NewRef(PyList_GET_ITEM(args, p->inputs[i].position));
        PyList_SetItem(args, p->inputs[i].position, Py_NewRef(Py_None));
    }
    int launched = 0;
    int64_t rewritten = run_chunks(p, f, stream, &launched, mark);
    PyObject *results = rewritten < 0 ? NULL : results_of(p, f);
    spend(p, RESULTS, mark);
    if (rewritten < 0 && !launched) /* nothing has run: the caller gets its arguments back */
        for (Py_ssize_t i = 0; i < p->n_inputs; i++)
            if (f->inputs[i])
                PyList_SetItem(args, p->inputs[i].position, Py_NewRef(f->inputs[i]));
    if (rewritten < 0)
        note_failure(index, launched > 0);
    PyObject *type, *value, *traceback; /* freeing must not see, or lose, the error */
    PyErr_Fetch(&type, &value, &traceback);
    for (Py_ssize_t i = 0; i < p->n_inputs; i++)
        Py_CLEAR(f->inputs[i]);
    for (Py_ssize_t i = p->n_blocks; i-- > 0;)
        drop(p, f, i);
    PyErr_Restore(type, value, traceback);
    spend(p, FREE, mark);
    return results ? Py_BuildValue("(NLn)", results, (long long)rewritten, index) : NULL;
}

static const char *CAPSULE = "pgraph.program", *GUARDS_ONLY = "pgraph.guards", *SET = "pgraph.programs";

static PyObject *try_program(pg_program *p, Py_ssize_t index, PyObject *args)
{
    size_t words = (size_t)(p->n_inputs + 2 * p->n_blocks + p->n_regions);
    void **memory = PyMem_Calloc(words ? words : 1, sizeof(void *));
    if (!memory)
        return PyErr_NoMemory();
    pg_frame f = {(PyObject **)memory, (PyObject **)memory + p->n_inputs, memory + p->n_inputs + p->n_blocks,
                  (uint64_t *)(memory + p->n_inputs + 2 * p->n_blocks)};
    void *stream = NULL;
    uint64_t mark = now(p);
    int right = matches(p, args, f.bases);
    if (right > 0)
        right = ready(p, &stream);
    spend(p, GUARDS, &mark);
    PyObject *done = right < 0 ? NULL : right ? run(p, index, args, &f, stream, &mark) : Py_NewRef(Py_None);
    PyMem_Free(memory);
    return done;
}

/* 1: `key` is today's; 0: there is none, so no guards hold; -1: a tensor cannot be read in place. */
static int key_of(const pg_set *set, PyObject *args, int64_t *key)
{
    const pg_program *p = set->programs[0]; /* all of them are of one device */
    for (Py_ssize_t i = 0; i < set->n_parts; i++) {
        const pg_part *part = &set->parts[i];
        if (part->position >= PyList_GET_SIZE(args))
            return 0;
        PyObject *argument = PyList_GET_ITEM(args, part->position);
        if (part->number == VALUE) {
            key[i] = PyObject_Hash(argument);
            if (key[i] == -1) { /* nothing that equals a number */
                PyErr_Clear();
                return 0;
            }
            continue;
        }
        void *handle = handle_in(p, argument);
        int64_t ndim, *size, *stride;
        if (!handle)
            return -1;
        if (p->dim(handle, &ndim) || part->dim >= ndim || p->size(handle, &size))
            return 0;
        key[i] = size[part->dim];
        if (part->number == SIZE)
            continue;
        if (p->stride(handle, &stride))
            return 0;
        key[i] = size[part->dim] > 1 ? stride[part->dim] : 0;
    }
    return 1;
}

static uint64_t hash_of(const int64_t *key, Py_ssize_t n)
{
    uint64_t hash = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        hash = (hash ^ (uint64_t)key[i]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    return hash;
}

static PyObject *call(PyObject *module, PyObject *const *given, Py_ssize_t n)
{
    (void)module;
    if (n != 2 || !PyList_Check(given[1])) {
        PyErr_SetString(PyExc_TypeError, "call(programs, list of arguments)");
        return NULL;
    }
    const pg_set *set = PyCapsule_GetPointer(given[0], SET);
    if (!set)
        return NULL;
    int64_t key[MOST_PARTS];
    int told = set->n_parts ? key_of(set, given[1], key) : -1;
    if (!told)
        Py_RETURN_NONE;
    for (Py_ssize_t i = told < 0 ? 0 : set->heads[hash_of(key, set->n_parts) & set->mask]; i >= 0 && i < set->n;
         i = told < 0 ? i + 1 : set->next[i]) {
        if (told > 0 && memcmp(key, set->keys + i * set->n_parts, (size_t)set->n_parts * sizeof *key))
            continue;
        PyObject *done = try_program(set->programs[i], i, given[1]);
        if (done != Py_None)
            return done;
        Py_DECREF(done);
    }
    Py_RETURN_NONE;
}

/* addresses(guards or program, args) -> of the device tensors, a list; None if a guard does not hold */
static PyObject *addresses(PyObject *module, PyObject *const *given, Py_ssize_t n)
{
    (void)module;
    if (n != 2 || !PyList_Check(given[1])) {
        PyErr_SetString(PyExc_TypeError, "addresses(guards or program, list of arguments)");
        return NULL;
    }
    pg_program *p = PyCapsule_GetPointer(given[0], PyCapsule_IsValid(given[0], CAPSULE) ? CAPSULE : GUARDS_ONLY);
    uint64_t *found = p ? PyMem_Calloc(p->n_inputs ? (size_t)p->n_inputs : 1, sizeof *found) : NULL;
    if (!found)
        return p ? PyErr_NoMemory() : NULL;
    int right = matches(p, given[1], found);
    PyObject *list = right > 0 ? PyList_New(p->n_inputs) : NULL;
    for (Py_ssize_t i = 0; list && i < p->n_inputs; i++) {
        PyObject *address = PyLong_FromUnsignedLongLong(found[i]);
        if (address)
            PyList_SET_ITEM(list, i, address);
        else
            Py_CLEAR(list);
    }
    PyMem_Free(found);
    return right ? list : Py_NewRef(Py_None);
}

/* -- building a program ---------------------------------------------------------------------- */

static void free_program(pg_program *p)
{
    if (!p)
        return;
    for (Py_ssize_t i = 0; p->inputs && i < p->n_inputs; i++)
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
    PyMem_Free(p->inputs);
    PyMem_Free(p->values);
    PyMem_Free(p->traits);
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

/* A field of a frozen dataclass. Borrowed: the dataclass owns it for as long as the program lives. */
static PyObject *field(PyObject *object, const char *name)
{
    PyObject *value = object ? PyObject_GetAttrString(object, name) : NULL;
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

static int read_alloc(const pg_program *p, pg_alloc *a, PyObject *spec)
{
    PyObject *tenants = tuple_field(spec, "tenants");
    if (!tenants || !(a->tenants = zeroed(a->n_tenants = PyTuple_GET_SIZE(tenants), sizeof(pg_tenant))))
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
    for (Py_ssize_t i = 0; i < a->n_tenants; i++) {
        long long region, offset;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tenants, i), "LL", &region, &offset))
            return -1;
        if (region < 0 || region >= p->n_regions)
            return -1;
        a->tenants[i] = (pg_tenant){region, (uint64_t)offset};
    }
    return 0;
}

static int read_chunk(const pg_program *p, pg_chunk *chunk, PyObject *spec)
{
    PyObject *allocate = tuple_field(spec, "allocate"), *frees = tuple_field(spec, "free");
    PyObject *releases = tuple_field(spec, "release"), *exec = field(spec, "exec");
    if (!allocate || !frees || !releases || !exec)
        return -1;
    if (exec != Py_None && !(chunk->exec = address_field(exec, "entry"))) {
        PyErr_SetString(PyExc_ValueError, "an exec cannot be launched from C: it has no entry");
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

/* Of a result that `tensors.cpp` can make. */
static int read_alias(const pg_program *p, pg_result *r)
{
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

/* program(Program, Calls) -> one of those that `call` looks into */
static PyObject *program(PyObject *module, PyObject *const *given, Py_ssize_t n)
{
    (void)module;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "program(Program, Calls)");
        return NULL;
    }
    pg_program *p = zeroed(1, sizeof *p);
    if (!p)
        return NULL;
    p->source = Py_NewRef(given[0]);
    p->calls = Py_NewRef(given[1]);
    p->n_regions = (Py_ssize_t)number_field(p->source, "n_regions");
    p->n_blocks = (Py_ssize_t)number_field(p->source, "n_blocks");
    if (PyErr_Occurred() || read_calls(p, p->calls) ||
        read_workspace(p, field(p->source, "workspace")) || read_guards(p, field(p->source, "guards")) ||
        read_chunks(p, tuple_field(p->source, "chunks")) || read_results(p, tuple_field(p->source, "results")) ||
        PyErr_Occurred()) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a launch program names a block, a region or an argument that it does not have");
        free_program(p);
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(p, CAPSULE, free_capsule);
    if (!capsule)
        free_program(p);
    return capsule;
}

/* guards(Guards, Calls) -> what `addresses` looks at */
static PyObject *guards_alone(PyObject *module, PyObject *const *given, Py_ssize_t n)
{
    (void)module;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "guards(Guards, Calls)");
        return NULL;
    }
    pg_program *p = zeroed(1, sizeof *p);
    if (!p)
        return NULL;
    p->source = Py_NewRef(given[0]);
    p->calls = Py_NewRef(given[1]);
    PyObject *capsule = NULL;
    if (!read_calls(p, p->calls) && !read_guards(p, p->source))
        capsule = PyCapsule_New(p, GUARDS_ONLY, free_capsule);
    if (!capsule) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a guard names an argument that cannot be there");
        free_program(p);
    }
    return capsule;
}

static int read_parts(pg_set *set, PyObject *parts, PyObject *keys)
{
    Py_ssize_t given = PyTuple_GET_SIZE(parts);
    set->n_parts = given < MOST_PARTS ? given : MOST_PARTS;
    if (!(set->parts = zeroed(set->n_parts, sizeof(pg_part))) ||
        !(set->keys = zeroed(set->n * set->n_parts, sizeof(int64_t))))
        return -1;
    for (Py_ssize_t i = 0; i < set->n_parts; i++) {
        PyObject *part = PyTuple_GET_ITEM(parts, i);
        set->parts[i] = (pg_part){(int)number_field(part, "number"), (Py_ssize_t)number_field(part, "position"),
                                  (Py_ssize_t)number_field(part, "dim")};
        if (PyErr_Occurred() || set->parts[i].number < VALUE || set->parts[i].number > STRIDE ||
            set->parts[i].position < 0 || set->parts[i].dim < 0)
            return -1;
    }
    for (Py_ssize_t i = 0; i < set->n; i++) {
        PyObject *key = PyTuple_GET_ITEM(keys, i);
        if (!PyTuple_Check(key) || PyTuple_GET_SIZE(key) != given)
            return -1;
        for (Py_ssize_t k = 0; k < set->n_parts; k++)
            set->keys[i * set->n_parts + k] = PyLong_AsLongLong(PyTuple_GET_ITEM(key, k));
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int read_programs(pg_set *set)
{
    uint64_t size = 1;
    while (size < 2 * (uint64_t)set->n)
        size *= 2;
    set->mask = size - 1;
    if (!(set->programs = zeroed(set->n, sizeof(pg_program *))) ||
        !(set->heads = zeroed((Py_ssize_t)size, sizeof(Py_ssize_t))) ||
        !(set->next = zeroed(set->n, sizeof(Py_ssize_t))))
        return -1;
    memset(set->heads, -1, size * sizeof(Py_ssize_t));
    for (Py_ssize_t i = set->n; i-- > 0;) { /* the first comes to the head */
        set->programs[i] = PyCapsule_GetPointer(PyTuple_GET_ITEM(set->owners, i), CAPSULE);
        if (!set->programs[i])
            return -1;
        Py_ssize_t *head = &set->heads[hash_of(set->keys + i * set->n_parts, set->n_parts) & set->mask];
        set->next[i] = *head;
        *head = i;
    }
    return 0;
}

/* programs(parts, keys, tuple of programs) -> what `call` looks into */
static PyObject *programs(PyObject *module, PyObject *const *given, Py_ssize_t n)
{
    (void)module;
    if (n != 3 || !PyTuple_Check(given[0]) || !PyTuple_Check(given[1]) || !PyTuple_Check(given[2])) {
        PyErr_SetString(PyExc_TypeError, "programs(tuple of parts, tuple of keys, tuple of programs)");
        return NULL;
    }
    pg_set *set = zeroed(1, sizeof *set);
    if (!set)
        return NULL;
    set->owners = Py_NewRef(given[2]);
    set->n = PyTuple_GET_SIZE(set->owners);
    PyObject *capsule = NULL;
    if (set->n && PyTuple_GET_SIZE(given[1]) == set->n && !read_parts(set, given[0], given[1]) && !read_programs(set))
        capsule = PyCapsule_New(set, SET, free_set_capsule);
    if (!capsule) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "each program of a partition has a key with a number for each part");
        free_set(set);
    }
    return capsule;
}

/* time_calls(program, on) -> nanoseconds of each phase since it was switched on */
static PyObject *time_calls(PyObject *module, PyObject *const *given, Py_ssize_t n)
{
    (void)module;
    pg_program *p = n == 2 ? PyCapsule_GetPointer(given[0], CAPSULE) : NULL;
    int on = p ? PyObject_IsTrue(given[1]) : -1;
    if (on < 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "time_calls(program, on)");
        return NULL;
    }
    PyObject *spent = PyTuple_New(N_PHASES);
    for (int i = 0; spent && i < N_PHASES; i++)
        PyTuple_SET_ITEM(spent, i, PyLong_FromUnsignedLongLong(p->spent[i]));
    p->timed = on;
    memset(p->spent, 0, sizeof p->spent);
    return PyErr_Occurred() ? NULL : spent;
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, "call(programs, args): (results, rewritten, index)"},
    {"addresses", (PyCFunction)(void (*)(void))addresses, METH_FASTCALL, "addresses(guards or program, args): list"},
    {"guards", (PyCFunction)(void (*)(void))guards_alone, METH_FASTCALL, "guards(Guards, Calls): for `addresses`"},
    {"programs", (PyCFunction)(void (*)(void))programs, METH_FASTCALL, "programs(parts, keys, programs): for `call`"},
    {"program", (PyCFunction)(void (*)(void))program, METH_FASTCALL, "program(Program, Calls): for `programs`"},
    {"time_calls", (PyCFunction)(void (*)(void))time_calls, METH_FASTCALL, "time_calls(program, on): ns of each phase"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_pgraph_launch", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pgraph_launch(void)
{
    static const struct {
        const char *name;
        int value;
    } names[] = {{"CONSTANT", CONSTANT}, {"BLOCK", BLOCK}, {"INPUT", INPUT}, {"RESULT", RESULT},
                 {"VALUE", VALUE}, {"SIZE", SIZE}, {"STRIDE", STRIDE}};
    name_data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject *module = name_data_ptr ? PyModule_Create(&definition) : NULL;
    for (size_t i = 0; module && i < sizeof names / sizeof *names; i++)
        if (PyModule_AddIntConstant(module, names[i].name, names[i].value))
            Py_CLEAR(module);
    return module;
}
