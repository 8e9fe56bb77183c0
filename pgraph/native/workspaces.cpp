/* cuBLAS's workspaces, which Python cannot tell apart: see Note [Others' workspaces] in
 * drivers/cuda/workspaces.py.
 *
 * WORKSPACE_MAP names a header with `WorkspaceMapWithMutex` and `getCurrentCUDABlasHandle` as this PyTorch
 * declares them: its own ATen/cuda/CUDAContextLight.h would need all of CUDA's headers. */
#include <c10/core/Allocator.h>

#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

struct cublasContext;

namespace at::cuda {
#include WORKSPACE_MAP
WorkspaceMapWithMutex& cublas_handle_stream_to_workspace();
WorkspaceMapWithMutex& cublaslt_handle_stream_to_workspace();
} // namespace at::cuda

namespace {

using Map = decltype(at::cuda::WorkspaceMapWithMutex::map);
static_assert(std::is_same_v<Map::key_type, std::tuple<void*, void*>>, "(handle, stream)");

/* What an entry holds: the memory, or (2.13) the memory and its size. */
uint64_t address(const at::DataPtr& memory) { return reinterpret_cast<uint64_t>(memory.get()); }
uint64_t address(const std::pair<at::DataPtr, size_t>& sized) { return address(sized.first); }

/* Whether an entry has room for so many bytes. Those that do not say are all of one size. */
bool has(const at::DataPtr&, uint64_t) { return true; }
bool has(const std::pair<at::DataPtr, size_t>& sized, uint64_t nbytes) { return sized.second >= nbytes; }

int64_t drop(at::cuda::WorkspaceMapWithMutex& held, void* stream, uint64_t low, uint64_t high)
{
    std::vector<Map::mapped_type> gone; /* freed without the lock: the allocator has locks of its own */
    {
        std::unique_lock<std::shared_mutex> lock(held.mutex);
        for (auto it = held.map.begin(); it != held.map.end();) {
            const uint64_t at = address(it->second);
            if (std::get<1>(it->first) == stream || (low <= at && at < high)) {
                gone.push_back(std::move(it->second));
                it = held.map.erase(it);
            } else {
                ++it;
            }
        }
    }
    return static_cast<int64_t>(gone.size());
}

int64_t list(at::cuda::WorkspaceMapWithMutex& held, uint64_t* found, int64_t room, int64_t count)
{
    std::shared_lock<std::shared_mutex> lock(held.mutex);
    for (const auto& entry : held.map) {
        if (count < room)
            found[count] = address(entry.second);
        ++count;
    }
    return count;
}

} // namespace

/* Those of the stream, and those in [low, high), whatever their stream; returns how many there were. */
extern "C" int64_t pg_drop_workspaces(void* stream, uint64_t low, uint64_t high)
{
    return drop(at::cuda::cublas_handle_stream_to_workspace(), stream, low, high) +
        drop(at::cuda::cublaslt_handle_stream_to_workspace(), stream, low, high);
}

/* Where they all begin, as far as there is room; returns how many there are. */
extern "C" int64_t pg_workspaces(uint64_t* found, int64_t room)
{
    const int64_t count = list(at::cuda::cublas_handle_stream_to_workspace(), found, room, 0);
    return list(at::cuda::cublaslt_handle_stream_to_workspace(), found, room, count);
}

/* The workspace of this thread's handle on its current stream, which is `stream`, as a product finds it: made
 * if there is none. 0: there is none and no memory for it, or it has fewer bytes than `nbytes`. */
extern "C" uint64_t pg_current_workspace(void* stream, uint64_t nbytes)
{
    try {
        void* handle = at::cuda::getCurrentCUDABlasHandle();
        auto& held = at::cuda::cublas_handle_stream_to_workspace();
        std::shared_lock<std::shared_mutex> lock(held.mutex);
        const auto found = held.map.find(std::make_tuple(handle, stream));
        return found != held.map.end() && has(found->second, nbytes) ? address(found->second) : 0;
    } catch (const std::exception&) {
        return 0;
    }
}
