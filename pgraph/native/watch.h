/* Storages that tell when they go (Note [Storages that tell] in `pgraph/native/timeline.py`). Part of
 * `tensors.cpp`. */

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

void stop_holding(Watching& watching)
{
    std::vector<c10::DataPtr> memory;
    const std::lock_guard<std::mutex> lock(watching.mutex);
    watching.holding = false;
    memory.swap(watching.memory);
} /* unlocked, and only then is memory given back */

bool is_watched(const c10::StorageImpl* s, const Watching& by)
{
    const c10::DataPtr& data = s->data_ptr();
    return data.get_deleter() == &storage_went &&
        static_cast<const Token*>(data.get_context())->watching.get() == &by;
}

void watch_storage(c10::StorageImpl* s, const std::shared_ptr<Watching>& watching, int64_t number)
{
    auto token = std::make_unique<Token>(Token{watching, number, c10::DataPtr()});
    {
        const std::lock_guard<std::mutex> lock(watching->mutex);
        watching->living.insert(number);
    }
    const c10::DataPtr& before = s->data_ptr();
    c10::DataPtr mine(before.get(), token.get(), &storage_went, before.device());
    Token* owned = token.release();
    owned->memory = s->set_data_ptr(std::move(mine));
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
