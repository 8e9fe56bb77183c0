/* The class `Timeline` of `pgraph/native/timeline.py`. Part of `tensors.cpp`. */

/* An allocation. */
struct Seen {
    uint64_t address;
    size_t nbytes;
    int64_t birth;
    int64_t death; /* -1 while it lives */
    const void* owner;
};

struct History {
    std::shared_ptr<Watching> watching = std::make_shared<Watching>();
    std::vector<Seen> seen;
    std::unordered_set<uint64_t> known; /* addresses of those that live */
    std::vector<std::pair<int64_t, int64_t>> marks;
    uint64_t low = 0, high = 0;
    int64_t device = -1;
    int64_t (*counter)(void*) = nullptr;
    void* counted = nullptr;
    const uint64_t* cursor = nullptr;
    PyObject *count = nullptr, *position = nullptr, *take = nullptr, *flat = nullptr;
};

struct Timeline {
    PyObject_HEAD
    History* history;
};

History& history_of(PyObject* self)
{
    return *reinterpret_cast<Timeline*>(self)->history;
}

/* `place`: a `Place`. */
PyObject* timeline_new(PyTypeObject* type, PyObject* args, PyObject*)
{
    PyObject* place = nullptr;
    PyObject* ask[4];
    unsigned long long low = 0, high = 0, counter = 0, counted = 0, cursor = 0;
    long long device = 0;
    if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &place) ||
        !PyArg_ParseTuple(place, "KKLOOOOKKK", &low, &high, &device, &ask[0], &ask[1], &ask[2], &ask[3], &counter,
                          &counted, &cursor))
        return nullptr;
    auto* made = reinterpret_cast<Timeline*>(type->tp_alloc(type, 0));
    if (made == nullptr)
        return nullptr;
    auto* h = made->history = new History;
    h->low = low;
    h->high = high;
    h->device = device;
    h->counter = reinterpret_cast<int64_t (*)(void*)>(counter);
    h->counted = reinterpret_cast<void*>(counted);
    h->cursor = reinterpret_cast<const uint64_t*>(cursor);
    h->count = Py_NewRef(ask[0]);
    h->position = Py_NewRef(ask[1]);
    h->take = Py_NewRef(ask[2]);
    h->flat = Py_NewRef(ask[3]);
    return reinterpret_cast<PyObject*>(made);
}

void timeline_dealloc(PyObject* self)
{
    PyTypeObject* type = Py_TYPE(self);
    History* h = reinterpret_cast<Timeline*>(self)->history;
    stop_holding(*h->watching);
    for (PyObject* asked : {h->count, h->position, h->take, h->flat})
        Py_DECREF(asked);
    delete h;
    type->tp_free(self);
    Py_DECREF(type);
}

/* What a Python function without arguments says; -1: there is a Python error. */
int64_t told_by(PyObject* function)
{
    PyObject* told = PyObject_CallNoArgs(function);
    if (told == nullptr)
        return -1;
    const int64_t number = PyLong_AsLongLong(told);
    Py_DECREF(told);
    return number;
}

/* -1: there is a Python error. */
int64_t count_now(History& h)
{
    if (h.counter != nullptr) {
        const int64_t count = h.counter(h.counted);
        if (count >= 0)
            return count;
    }
    const int64_t count = told_by(h.count);
    if (count > 0)
        h.counter = nullptr;
    return count;
}

Py_ssize_t timeline_length(PyObject* self)
{
    return static_cast<Py_ssize_t>(history_of(self).seen.size());
}

PyObject* timeline_count(PyObject* self, PyObject*)
{
    const int64_t count = count_now(history_of(self));
    return count == -1 && PyErr_Occurred() != nullptr ? nullptr : PyLong_FromLongLong(count);
}

PyObject* timeline_boundary(PyObject* self, PyObject* const* args, Py_ssize_t n)
{
    History& h = history_of(self);
    const int64_t count = n > 0 && args[0] != Py_None ? PyLong_AsLongLong(args[0]) : count_now(h);
    if (count == -1 && PyErr_Occurred() != nullptr)
        return nullptr;
    const int64_t position = h.cursor != nullptr ? static_cast<int64_t>(*h.cursor) : told_by(h.position);
    if (position == -1 && PyErr_Occurred() != nullptr)
        return nullptr;
    if (h.marks.empty() || h.marks.back() != std::make_pair(position, count))
        h.marks.emplace_back(position, count);
    {
        const std::lock_guard<std::mutex> lock(h.watching->mutex);
        for (const int64_t number : h.watching->ended) {
            Seen& gone = h.seen[static_cast<size_t>(number)];
            gone.death = count;
            h.known.erase(gone.address);
        }
        h.watching->ended.clear();
    }
    return PyLong_FromLongLong(count);
}

/* Returns 0; -1: there is a Python error. */
int track_storage(History& h, c10::StorageImpl* s, uint64_t address, size_t nbytes, int64_t birth)
{
    try {
        watch_storage(s, h.watching, static_cast<int64_t>(h.seen.size()));
        h.seen.push_back({address, nbytes, birth, -1, s});
        h.known.insert(address);
        return 0;
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return -1;
    }
}

/* Returns for how many storages memory is held that was not before: 0 or 1; -1: there is a Python error. */
int adopt_one(History& h, PyObject* tensor, int64_t birth)
{
    c10::StorageImpl* s = storage_anyhow(tensor);
    if (s == nullptr)
        return -1;
    if (is_watched(s, *h.watching))
        return 0; /* a view, an argument, an alias of an input: its storage may begin before its range */
    const size_t nbytes = s->nbytes();
    if (nbytes == 0) {
        if (h.device < 0 ? !s->device().is_cpu() : s->device() != device_at(h.device))
            return 0;
        PyObject* taken = PyObject_CallFunction(h.take, "i", 0); /* allocators give no address */
        const uint64_t address = taken != nullptr ? PyLong_AsUnsignedLongLong(taken) : 0;
        Py_XDECREF(taken);
        return PyErr_Occurred() != nullptr ? -1 : track_storage(h, s, address, 0, birth);
    }
    const auto address = reinterpret_cast<uint64_t>(s->data());
    if (address < h.low || address >= h.high || h.known.count(address) > 0)
        return 0;
    return track_storage(h, s, address, nbytes, birth) == 0 ? 1 : -1;
}

PyObject* timeline_adopt(PyObject* self, PyObject* const* args, Py_ssize_t n)
{
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "adopt() takes results and a number");
        return nullptr;
    }
    History& h = history_of(self);
    const int64_t birth = PyLong_AsLongLong(args[1]);
    if (birth == -1 && PyErr_Occurred() != nullptr)
        return nullptr;
    if (reinterpret_cast<PyObject*>(Py_TYPE(args[0])) == others[2]) {
        const int held = adopt_one(h, args[0], birth);
        return held < 0 ? nullptr : PyLong_FromLong(held);
    }
    PyObject* found = PyObject_CallOneArg(h.flat, args[0]);
    PyObject* leaves = found != nullptr ? PySequence_Fast(found, "the values of a result are a sequence") : nullptr;
    Py_XDECREF(found);
    long held = 0;
    for (Py_ssize_t i = 0; leaves != nullptr && i < PySequence_Fast_GET_SIZE(leaves); i++) {
        PyObject* leaf = PySequence_Fast_GET_ITEM(leaves, i);
        const int is_tensor = PyObject_IsInstance(leaf, others[2]);
        const int one = is_tensor > 0 ? adopt_one(h, leaf, birth) : is_tensor;
        if (one < 0)
            Py_CLEAR(leaves);
        else
            held += one;
    }
    if (leaves == nullptr)
        return nullptr;
    Py_DECREF(leaves);
    return PyLong_FromLong(held);
}

PyObject* timeline_track(PyObject* self, PyObject* const* args, Py_ssize_t n)
{
    if (n != 4) {
        PyErr_SetString(PyExc_TypeError, "track() takes a tensor, an address, bytes and a number");
        return nullptr;
    }
    const uint64_t address = PyLong_AsUnsignedLongLong(args[1]);
    const size_t nbytes = PyLong_AsSize_t(args[2]);
    const int64_t birth = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred() != nullptr)
        return nullptr;
    c10::StorageImpl* s = storage_anyhow(args[0]);
    if (s == nullptr || track_storage(history_of(self), s, address, nbytes, birth) != 0)
        return nullptr;
    Py_RETURN_NONE;
}

/* A list, of what `item` makes of each. */
template <typename Items, typename Make> PyObject* list_of(const Items& items, const Make& item)
{
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(items.size()));
    Py_ssize_t i = 0;
    for (const auto& one : items) {
        PyObject* made = list != nullptr ? item(one) : nullptr;
        if (made == nullptr) {
            Py_XDECREF(list);
            return nullptr;
        }
        PyList_SET_ITEM(list, i++, made);
    }
    return list;
}

PyObject* timeline_seen(PyObject* self, PyObject* const* args, Py_ssize_t n)
{
    const std::vector<Seen>& all = history_of(self).seen;
    const size_t first = n > 0 ? PyLong_AsSize_t(args[0]) : 0;
    if (PyErr_Occurred() != nullptr)
        return nullptr;
    const std::vector<Seen> found(all.begin() + static_cast<std::ptrdiff_t>(std::min(first, all.size())), all.end());
    return list_of(found, [](const Seen& s) {
        PyObject* death = s.death < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(s.death);
        return Py_BuildValue("KnLNK", static_cast<unsigned long long>(s.address), static_cast<Py_ssize_t>(s.nbytes),
                             static_cast<long long>(s.birth), death,
                             static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(s.owner)));
    });
}

PyObject* timeline_marks(PyObject* self, PyObject*)
{
    return list_of(history_of(self).marks, [](const std::pair<int64_t, int64_t>& m) {
        return Py_BuildValue("LL", static_cast<long long>(m.first), static_cast<long long>(m.second));
    });
}

PyObject* timeline_living(PyObject* self, PyObject*)
{
    std::set<int64_t> living;
    {
        Watching& watching = *history_of(self).watching;
        const std::lock_guard<std::mutex> lock(watching.mutex);
        living = watching.living;
    }
    return list_of(living, [](int64_t number) { return PyLong_FromLongLong(number); });
}

PyObject* timeline_let_go(PyObject* self, PyObject*)
{
    stop_holding(*history_of(self).watching);
    Py_RETURN_NONE;
}

template <typename Function> PyCFunction as_method(Function* function)
{
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef timeline_methods[] = {
    {"count", timeline_count, METH_NOARGS, nullptr},
    {"boundary", as_method(timeline_boundary), METH_FASTCALL, nullptr},
    {"adopt", as_method(timeline_adopt), METH_FASTCALL, nullptr},
    {"track", as_method(timeline_track), METH_FASTCALL, nullptr},
    {"seen", as_method(timeline_seen), METH_FASTCALL, nullptr},
    {"marks", timeline_marks, METH_NOARGS, nullptr},
    {"living", timeline_living, METH_NOARGS, nullptr},
    {"let_go", timeline_let_go, METH_NOARGS, nullptr},
    {"close", timeline_let_go, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot timeline_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(timeline_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(timeline_dealloc)},
    {Py_tp_methods, timeline_methods},
    {Py_mp_length, reinterpret_cast<void*>(timeline_length)},
    {0, nullptr},
};

PyType_Spec timeline_spec = {"_pgraph_tensors.Timeline", sizeof(Timeline), 0, Py_TPFLAGS_DEFAULT, timeline_slots};

PyObject* timeline_class()
{
    return PyType_FromSpec(&timeline_spec);
}
