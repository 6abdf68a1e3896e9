// Where elements of a stored matrix go in a weight. No guard: see ../widen.cu.

// How the elements of heads lie along a dimension: `own` of the model in `dim` of the weight, either half at a half's beginning.
struct Axis {
    unsigned own;
    unsigned dim;
    // Whether the file has the halves' elements beside each other: a0 b0 a1 b1.
    unsigned neighbours;
};

__device__ __forceinline__ unsigned place(const Axis& axis, unsigned i) {
    const unsigned half = (axis.own + 1) / 2;
    if (axis.own == axis.dim && axis.neighbours == 0) {
        return i;
    }
    unsigned at = i % axis.own;
    if (axis.neighbours != 0) {
        at = at / 2 + at % 2 * half;
    }
    return i / axis.own * axis.dim + (at < half ? at : at - half + axis.dim / 2);
}

struct Target {
    unsigned first_row;
    unsigned first_column;
    unsigned columns;
    Axis rows;
    Axis across;
    unsigned row_stride;
    unsigned column_stride;
};

// A thread for an element; `from` begins with a block, whose first element is that of the target.
template <typename T>
__device__ __forceinline__ void widen(const unsigned char* from, unsigned format, unsigned count, T* to, const Target& target) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
#ifdef STILLHOUSE_BROKEN_TAIL
    if (i + 1 < count) {
#else
    if (i < count) {
#endif
        const unsigned at = target.first_column + i;
        const size_t row = place(target.rows, target.first_row + at / target.columns);
        const size_t column = place(target.across, at % target.columns);
        to[row * target.row_stride + column * target.column_stride] = from_float<T>(element(from, format, i));
    }
}
