// Noise of a slice of logits that lies in device memory: see operators/noise, whose results these kernels have.
//
//   logits [n, V] ──read──► softmax: max, Z, ln p_x ──► topk (one read)
//        ├────────read─────────────────┤► signals: a read each (and one for each temperature)
//        └────────read─────────────────┴► candidates ─► search ─► offsets ─► gather ─► ln p_x, corrections
//                                      └► dense (one read)
//
// What these kernels cannot do for a row, they say, and the CPU's encoder does that row: nothing is approximate.
#include "portable.cuh"

#define NOISE_KERNEL_(name, threads, blocks) KERNEL_BOUNDS(name, threads, blocks)
#define NOISE_EXPORT_(name) EXPORT(name)
#define NOISE_KERNEL(name, threads, blocks) NOISE_KERNEL_(NOISE_NAME(name), threads, blocks)
#define NOISE_EXPORT(name) NOISE_EXPORT_(NOISE_NAME(name))

#define NOISE_NAME(name) noise_##name
namespace noise {
#include "noise/all.cuh"
}
#undef NOISE_NAME

#ifndef __CUDACC__
// The same with a mistake each: a test shows that the suite sees them.
#define STILLHOUSE_BROKEN_REDUCTION
#define NOISE_NAME(name) broken_reduction_##name
namespace noise_broken_reduction {
#include "noise/all.cuh"
}
#undef NOISE_NAME
#undef STILLHOUSE_BROKEN_REDUCTION

#define STILLHOUSE_BROKEN_TAIL
#define NOISE_NAME(name) broken_tail_##name
namespace noise_broken_tail {
#include "noise/all.cuh"
}
#undef NOISE_NAME
#undef STILLHOUSE_BROKEN_TAIL

#define STILLHOUSE_BROKEN_RACE
#define NOISE_NAME(name) broken_race_##name
namespace noise_broken_race {
#include "noise/all.cuh"
}
#undef NOISE_NAME
#undef STILLHOUSE_BROKEN_RACE
#endif

#undef NOISE_KERNEL
#undef NOISE_EXPORT
#undef NOISE_KERNEL_
#undef NOISE_EXPORT_
