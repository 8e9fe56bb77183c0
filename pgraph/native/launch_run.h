/* A part of `launch.c`: the chunks of a program, one after the other, and the results. */

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
        if (chunk->recipe) {
            int64_t code;
            if (p->workspace >= 0 && bind_workspace(p, f, stream))
                return -1;
            /* A launch may wait for room in the device's queue. */
            Py_BEGIN_ALLOW_THREADS
            code = p->launch(chunk->recipe, stream, f->bases);
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
    PyObject *made = handle ? p->make_alias(handle, r->made.ndim, r->made.layout, r->offset, r->number) : NULL;
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
