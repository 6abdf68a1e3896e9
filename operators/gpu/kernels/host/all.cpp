// All kernels as one translation unit for the CPU, and the C entry points that launch them.
#include <string>

#include "../portable.cuh"

#if __has_include("../noise.cu")
#include "../noise.cu"
#endif
#if __has_include("../forward.cu")
#include "../forward.cu"
#endif
#if __has_include("../attention.cu")
#include "../attention.cu"
#endif
#if __has_include("../widen.cu")
#include "../widen.cu"
#endif
#if __has_include("../fp8.cu")
#include "../fp8.cu"
#endif
#ifdef STILLHOUSE_SELFTEST
#include "selftest.cu"
#endif
#ifdef STILLHOUSE_MUTANTS
#include "mutants.cu"
#endif

namespace stillhouse_host {

static const Kernel* find_kernel(const char* name) {
    for (const Kernel* kernel = kernels(); kernel != nullptr; kernel = kernel->next) {
        if (std::strcmp(kernel->name, name) == 0) {
            return kernel;
        }
    }
    return nullptr;
}

// One for each OS thread that launches: its stacks and its shared memory are kept for the next launch.
static Engine& own_engine() {
    static thread_local Engine own;
    engine = &own;
    return own;
}

}  // namespace stillhouse_host

// Runs a kernel to its end. 0: done; 1: no such kernel; 2: threads that wait for each other for ever; 3: an empty grid, too many
// threads (1024, or the kernel's own bound) or too much shared memory (227 KiB in all, 48 KiB of them static); 4: a bad shared
// address, a write past a shared array or the stack, an exception.
extern "C" int stillhouse_host_launch(const char* kernel, const uint32_t grid[3], const uint32_t block[3], uint32_t shared_bytes, void** args,
                                      uint64_t schedule_seed) {
    using namespace stillhouse_host;
    try {
        const Kernel* found = find_kernel(kernel);
        if (found == nullptr) {
            return UNKNOWN_KERNEL;
        }
        if (uint64_t{block[0]} * block[1] > found->max_threads || uint64_t{block[0]} * block[1] * block[2] > found->max_threads) {
            return TOO_LARGE;
        }
        return own_engine().launch(found->entry, grid, block, shared_bytes, args, schedule_seed);
    } catch (...) {
        return BAD_ACCESS;
    }
}

// The names of all kernels, one a line, in no particular order.
extern "C" const char* stillhouse_host_kernels() {
    static const std::string names = [] {
        std::string lines;
        for (const stillhouse_host::Kernel* kernel = stillhouse_host::kernels(); kernel != nullptr; kernel = kernel->next) {
            lines += kernel->name;
            lines += '\n';
        }
        return lines;
    }();
    return names.c_str();
}
