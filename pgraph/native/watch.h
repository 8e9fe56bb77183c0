/* Which storages still live: each tells when it goes. Part of `tensors.cpp`; what it does for captures is told in
 * `pgraph/native/watch.py`. */

/* One capture's storages. Those that outlive it hold on to this. */
struct Watching {
    std::mutex mutex; /* a storage may go in any thread */
    std::vector<int64_t> ended;
    std::set<int64_t> living;
    std::vector<c10::DataPtr> memory; /* of those that have gone */
    bool holding = true;
};

/* What a watched storage owns in place of its memory. */
struct Token {
    std::shared_ptr<Watching> watching;
    int64_t number;
    c10::DataPtr memory;
};

void storage_went(void* context)
{
    const std::unique_ptr<Token> token(static_cast<Token*>(context));
    Watching& watching = *token->watching;
    const std::lock_guard<std::mutex> lock(watching.mutex);
    watching.ended.push_back(token->number);
    watching.living.erase(token->number);
    if (watching.holding)
        watching.memory.push_back(std::move(token->memory));
} /* unlocked, and only then is memory given back that is not held */

struct Watch {
    PyObject_HEAD
    std::shared_ptr<Watching>* watching;
};

Watching& watching_of(PyObject* self)
{
    return **reinterpret_cast<Watch*>(self)->watching;
}

PyObject* watch_new(PyTypeObject* type, PyObject*, PyObject*)
{
    auto* made = reinterpret_cast<Watch*>(type->tp_alloc(type, 0));
    if (made != nullptr)
        made->watching = new std::shared_ptr<Watching>(std::make_shared<Watching>());
    return reinterpret_cast<PyObject*>(made);
}

void stop_holding(Watching& watching)
{
    std::vector<c10::DataPtr> memory;
    const std::lock_guard<std::mutex> lock(watching.mutex);
    watching.holding = false;
    memory.swap(watching.memory);
} /* unlocked, and only then is memory given back */

void watch_dealloc(PyObject* self)
{
    PyTypeObject* type = Py_TYPE(self);
    stop_holding(watching_of(self));
    delete reinterpret_cast<Watch*>(self)->watching;
    type->tp_free(self);
    Py_DECREF(type);
}

/* The storage of any tensor, which keeps it. NULL: there is a Python error. */
c10::StorageImpl* storage_anyhow(PyObject* tensor)
{
    c10::StorageImpl* found = storage_in(tensor);
    if (found != nullptr)
        return found;
    PyObject* told = PyObject_CallOneArg(others[0], tensor);
    if (told == nullptr)
        return nullptr;
    found = static_cast<c10::StorageImpl*>(PyLong_AsVoidPtr(PyTuple_GetItem(told, 0)));
    Py_DECREF(told);
    return found;
}

PyObject* watch_first_seen(PyObject* self, PyObject* tensor)
{
    const c10::StorageImpl* s = storage_anyhow(tensor);
    if (s == nullptr)
        return nullptr;
    const c10::DataPtr& data = s->data_ptr();
    if (data.get_deleter() == &storage_went &&
        static_cast<const Token*>(data.get_context())->watching.get() == &watching_of(self))
        Py_RETURN_NONE;
    return Py_BuildValue("Kn", reinterpret_cast<uint64_t>(s->data()), static_cast<Py_ssize_t>(s->nbytes()));
}

PyObject* watch_add(PyObject* self, PyObject* const* args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "add() takes a tensor and a number");
        return nullptr;
    }
    const int64_t number = PyLong_AsLongLong(args[1]);
    if (number == -1 && PyErr_Occurred() != nullptr)
        return nullptr;
    c10::StorageImpl* s = storage_anyhow(args[0]);
    if (s == nullptr)
        return nullptr;
    try {
        const auto& watching = *reinterpret_cast<Watch*>(self)->watching;
        auto token = std::make_unique<Token>(Token{watching, number, c10::DataPtr()});
        {
            const std::lock_guard<std::mutex> lock(watching->mutex);
            watching->living.insert(number);
        }
        const c10::DataPtr& before = s->data_ptr();
        c10::DataPtr mine(before.get(), token.get(), &storage_went, before.device());
        Token* owned = token.release();
        owned->memory = s->set_data_ptr(std::move(mine));
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return nullptr;
    }
    return PyLong_FromVoidPtr(s);
}

template <typename Numbers> PyObject* list_of(const Numbers& numbers)
{
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(numbers.size()));
    Py_ssize_t i = 0;
    for (const int64_t number : numbers) {
        PyObject* item = list != nullptr ? PyLong_FromLongLong(number) : nullptr;
        if (item == nullptr) {
            Py_XDECREF(list);
            return nullptr;
        }
        PyList_SET_ITEM(list, i++, item);
    }
    return list;
}

PyObject* watch_ended(PyObject* self, PyObject*)
{
    std::vector<int64_t> ended;
    {
        const std::lock_guard<std::mutex> lock(watching_of(self).mutex);
        ended.swap(watching_of(self).ended);
    }
    return list_of(ended);
}

PyObject* watch_living(PyObject* self, PyObject*)
{
    std::set<int64_t> living;
    {
        const std::lock_guard<std::mutex> lock(watching_of(self).mutex);
        living = watching_of(self).living;
    }
    return list_of(living);
}

PyObject* watch_close(PyObject* self, PyObject*)
{
    stop_holding(watching_of(self));
    Py_RETURN_NONE;
}

PyMethodDef watch_methods[] = {
    {"first_seen", watch_first_seen, METH_O, nullptr},
    {"add", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(watch_add)), METH_FASTCALL, nullptr},
    {"ended", watch_ended, METH_NOARGS, nullptr},
    {"living", watch_living, METH_NOARGS, nullptr},
    {"let_go", watch_close, METH_NOARGS, nullptr},
    {"close", watch_close, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot watch_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(watch_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(watch_dealloc)},
    {Py_tp_methods, watch_methods},
    {0, nullptr},
};

PyType_Spec watch_spec = {"_pgraph_tensors.Watch", sizeof(Watch), 0, Py_TPFLAGS_DEFAULT, watch_slots};

/* The class. Its instances hold memory until they are told to let go (`Watch.holds`). */
PyObject* watch_class()
{
    PyObject* type = PyType_FromSpec(&watch_spec);
    if (type != nullptr && PyObject_SetAttrString(type, "holds", Py_True) != 0)
        Py_CLEAR(type);
    return type;
}
