// Gathers KV blocks of one layer into wire form, and scatters them out of it: one launch for all parts of the layer.
//
// Owns the index arithmetic on the device; kernels.py has the same in NumPy, and the two change together. It checks
// nothing: ids, sizes and alignment are the launcher's responsibility.
//
// grid.x is the KV block, grid.y a tile of its units, block.x the threads of a tile. A unit is what one thread copies:
// 1, 2, 4, 8 or 16 bytes, the most that every address, stride and run of the layer is aligned to.

#define MAX_AXES 8

struct Part {
    long long base;              // address of the part's block 0
    long long step;              // bytes from a block to the next
    long long begin, end;        // the part's units within a block on the wire
    long long axes;              // of a block of this part, outermost first; the innermost is the run of units
    long long count[MAX_AXES];   // units along each axis
    long long stride[MAX_AXES];  // bytes, may be negative
};

__device__ static char* unit_address(const Part* part, long long id, unsigned unit) {
    while (unit >= part->end) ++part;
    unsigned rest = unit - (unsigned)part->begin;
    long long offset = id * part->step;
    for (int axis = (int)part->axes - 1; axis >= 0; --axis) {
        const unsigned count = (unsigned)part->count[axis];
        offset += (long long)(rest % count) * part->stride[axis];
        rest /= count;
    }
    return (char*)(part->base + offset);
}

#define KERNELS(BYTES, UNIT)                                                                                       \
    extern "C" __global__ void gather_##BYTES(const Part* parts, const int* ids, unsigned units, UNIT* wire) {     \
        UNIT* out = wire + (long long)blockIdx.x * units;                                                          \
        const long long id = ids[blockIdx.x];                                                                      \
        for (unsigned u = blockIdx.y * blockDim.x + threadIdx.x; u < units; u += gridDim.y * blockDim.x)           \
            out[u] = *(const UNIT*)unit_address(parts, id, u);                                                     \
    }                                                                                                              \
    extern "C" __global__ void scatter_##BYTES(const Part* parts, const int* ids, unsigned units, const UNIT* wire) { \
        const UNIT* in = wire + (long long)blockIdx.x * units;                                                     \
        const long long id = ids[blockIdx.x];                                                                      \
        for (unsigned u = blockIdx.y * blockDim.x + threadIdx.x; u < units; u += gridDim.y * blockDim.x)           \
            *(UNIT*)unit_address(parts, id, u) = in[u];                                                            \
    }

KERNELS(1, unsigned char)
KERNELS(2, unsigned short)
KERNELS(4, unsigned int)
KERNELS(8, uint2)
KERNELS(16, uint4)
