/* A part of `launch.c`: are the arguments right? Note [Handles in place] is told there. */

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
    int empty = 0;
    for (int64_t i = 0; i < ndim; i++) {
        if (size[i] != in->size[i] || (stride[i] != in->size[ndim + i] && size[i] > 1))
            return 0;
        empty |= !size[i];
    }
    if (!data && !empty) /* its storage was shrunk */
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

/* 1: it is this number; 0: it is not; -1: a Python error. As `ValueGuard.holds`: 0.0 == -0.0, and 1 == True. */
static int is_number(PyObject *value, PyObject *number)
{
    if (Py_TYPE(value) != Py_TYPE(number))
        return 0;
    if (PyFloat_CheckExact(value) && !signbit(PyFloat_AS_DOUBLE(value)) != !signbit(PyFloat_AS_DOUBLE(number)))
        return 0;
    return PyObject_RichCompareBool(value, number, Py_EQ);
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
        int same = is_number(PyList_GET_ITEM(args, p->values[i].position), p->values[i].value);
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
