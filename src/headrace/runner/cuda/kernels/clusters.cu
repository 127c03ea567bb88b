// What kernels of clusters of two multiprocessors are made of: barriers that both signal to, tiles that the copy engine fetches
// for one or for both and writes, where tensor cores find them, and numbers. Knows no kernel.

struct alignas(64) Map {
  u64 words[16];
};

__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "AGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

// At the barrier of one of the cluster's two. It orders nothing but what is asynchronous anyway: with a release for the whole
// cluster a product took half as long again.
__device__ __forceinline__ void arrive(u32 barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(block)
      : "memory");
}

__device__ __forceinline__ void fetch(u32 to, const Map* map, u32 barrier, int column, int line) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(line)
      : "memory");
}

// To the same place of both, whose barriers count it each.
__device__ __forceinline__ void fetch_for_both(u32 to, const Map* map, u32 barrier, int column, int line) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(line), "h"((u16)3)
      : "memory");
}

__device__ __forceinline__ void write(const Map* map, u32 from, int column, int line) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(line)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Of a tile whose lines of 128 bytes are swizzled.
__device__ __forceinline__ u64 described(u32 at) {
  return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void meet_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 pair(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Of the low 16 bits.
__device__ __forceinline__ float number(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }
