/* One whole launch in C: runs the same `pgraph.launch.program.Program` as `pgraph.launch.interpreter`.
 *
 * program(Program, Calls, guards) reads the dataclasses once, and programs(parts, keys, those of a partition) lays out
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
#include "launch.h"
#include "launch_match.h"
#include "launch_run.h"
#include "launch_read.h"

/* -- calls ------------------------------------------------------------------------------------ */

static size_t words_of(const pg_program *p) { return (size_t)(p->n_inputs + 2 * p->n_blocks + p->n_regions); }

static PyObject *try_program(pg_set *set, Py_ssize_t index, PyObject *args)
{
    pg_program *p = set->programs[index];
    /* Asking for so much memory makes malloc tidy up all that the program freed since the last call. */
    void **memory = set->spare ? set->spare : PyMem_Malloc(set->words * sizeof(void *));
    if (!memory)
        return PyErr_NoMemory();
    set->spare = NULL; /* one of them may be called again before this call ends */
    memset(memory, 0, words_of(p) * sizeof(void *));
    pg_frame f = {(PyObject **)memory, (PyObject **)memory + p->n_inputs, memory + p->n_inputs + p->n_blocks,
                  (uint64_t *)(memory + p->n_inputs + 2 * p->n_blocks)};
    void *stream = NULL;
    uint64_t mark = now(p);
    int right = matches(p, args, f.bases);
    if (right > 0)
        right = ready(p, &stream);
    spend(p, GUARDS, &mark);
    PyObject *done = right < 0 ? NULL : right ? run(p, index, args, &f, stream, &mark) : Py_NewRef(Py_None);
    if (set->spare)
        PyMem_Free(memory);
    else
        set->spare = memory;
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
    pg_set *set = PyCapsule_GetPointer(given[0], SET);
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
        PyObject *done = try_program(set, i, given[1]);
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

/* -- what Python sees --------------------------------------------------------------------------- */

/* To be read from a dataclass and `Calls`; NULL with an error. */
static pg_program *empty_program(PyObject *const *given, int right, const char *usage)
{
    if (!right) {
        PyErr_SetString(PyExc_TypeError, usage);
        return NULL;
    }
    pg_program *p = zeroed(1, sizeof *p);
    if (p) {
        p->source = Py_NewRef(given[0]);
        p->calls = Py_NewRef(given[1]);
    }
    return p;
}

/* program(Program, Calls, guards or None) -> one of those that `call` looks into */
static PyObject *program(PyObject *module, PyObject *const *given, Py_ssize_t n)
{
    (void)module;
    pg_program *p = empty_program(given, n == 3, "program(Program, Calls, guards or None)");
    if (!p)
        return NULL;
    p->n_regions = (Py_ssize_t)number_field(p->source, "n_regions");
    p->n_blocks = (Py_ssize_t)number_field(p->source, "n_blocks");
    if (PyErr_Occurred() || read_calls(p, p->calls) ||
        read_workspace(p, field(p->source, "workspace")) || take_guards(p, field(p->source, "guards"), given[2]) ||
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
    pg_program *p = empty_program(given, n == 2, "guards(Guards, Calls)");
    if (!p)
        return NULL;
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
    set->words = 1;
    if (!(set->programs = zeroed(set->n, sizeof(pg_program *))) ||
        !(set->heads = zeroed((Py_ssize_t)size, sizeof(Py_ssize_t))) ||
        !(set->next = zeroed(set->n, sizeof(Py_ssize_t))))
        return -1;
    memset(set->heads, -1, size * sizeof(Py_ssize_t));
    for (Py_ssize_t i = set->n; i-- > 0;) { /* the first comes to the head */
        set->programs[i] = PyCapsule_GetPointer(PyTuple_GET_ITEM(set->owners, i), CAPSULE);
        if (!set->programs[i])
            return -1;
        if (words_of(set->programs[i]) > set->words)
            set->words = words_of(set->programs[i]);
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
