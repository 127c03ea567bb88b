// Products of at most 256 rows with a large matrix: its lines are the rows of a tile and the step's rows the columns, so that
// each row costs what it is. Either gates (GATED), of which silu(gate) * up is written; or sums of one part of the columns each,
// left in float32, part behind part, for the norm that comes next (`norms.sum_rms_norm`). bf16 in, compute capability 9.0.
//
// Two multiprocessors are a cluster. Each fetches one half of the rows for both, and has blocks of 64 lines of its own. Of gates
// a cluster has seven blocks: of the seventh each of the two multiplies all lines with one half of the rows. So 14,336 gates and
// as many others fill 64 of 66 clusters. In each, one warp fetches and two groups of four multiply: the first two blocks, the
// second one and the shared half; where rows are too many for that, in two passes over the columns (PASSES): a block each,
// then the first a block and the second the shared half.
//
// Defined by who compiles it: COUNT (of rows, a multiple of 16), STAGES, GATED, PASSES, `multiply`, and `multiply_half`, whose
// rows are half as many.

constexpr int SPAN = 64, HALF = 64, BLOCKS = 7, GATES = HALF / 2;
// Blocks that a multiprocessor fetches of a step, the shared one with them.
constexpr int HELD = GATED && PASSES == 1 ? 4 : 2;
// Bytes.
constexpr u32 BLOCK = HALF * SPAN * 2, ROWS = COUNT * SPAN * 2, STAGE = HELD * BLOCK + ROWS, PANEL = COUNT * GATES * 2;
// Gates of one pass have left the stages when they are written, and take their place.
constexpr u32 APART = GATED && PASSES == 2 ? 2 * PANEL : 0;
// Registers of a thread that multiplies, and of one that fetches: three groups of four warps have 65,536.
#define BUSY "232"
#define IDLE "40"
// A matrix is read once, and should not drive out what is read again.
constexpr u64 ONCE = 0x12F0000000000000;

struct Work {
  float* parts;
  int rows;
  int height;
  // Pairs of tiles of 128 lines, where there are no gates; and steps of a part of the columns.
  int pairs;
  int steps;
};

// What all of a block know.
struct Room {
  u32 base;
  u32 panels;
  u32 full;
  u32 free;
  u32 rank;
};

// A ring of stages, as one who fills or empties it goes round.
struct Ring {
  int at;
  u32 phase;
  __device__ __forceinline__ void next() {
    if (++at == STAGES) {
      at = 0;
      phase ^= 1;
    }
  }
};

#if GATED
// Gates and others by turns, eight of each, so that both of a pair are sums of one thread: a block, or a quarter of the two
// multiprocessors' shared one for each of them.
__device__ __forceinline__ void fetch_block(u32 to, const Map* map, u32 barrier, int column, int group) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %5, %5, %4}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(group), "r"(0), "l"(ONCE)
      : "memory");
}

__device__ __forceinline__ void fetch_shared(u32 to, const Map* map, u32 barrier, int column, int group) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %5, %5, %4}], [%2], %6, %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(group), "r"(0), "h"((u16)3), "l"(ONCE)
      : "memory");
}
#else
__device__ __forceinline__ void fetch_lines(u32 to, const Map* map, u32 barrier, int column, int line) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(line), "l"(ONCE)
      : "memory");
}
#endif

__device__ __forceinline__ void meet() {
  __syncwarp();
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

__device__ __forceinline__ void provide(const Map& lines_map, const Map& shared_map, const Map& rows_map, const Work& work,
                                        const Room& room) {
  int cluster = blockIdx.x / 2, first = GATED ? 0 : cluster / work.pairs * work.steps;
  Ring ring{0, 1};
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    auto fetch_matrix = [&](const Ring& place, int step) {
      u32 to = room.base + place.at * STAGE, barrier = room.full + 8 * place.at;
      int column = (first + step) * SPAN;
      wait(room.free + 8 * place.at, place.phase);
      expect(barrier, STAGE);
#if GATED
      constexpr int own[2] = {PASSES == 1 ? 3 : 2, 1};
      int group = cluster * (BLOCKS * 4) + (int)room.rank * 12 + pass * 8;
#pragma unroll
      for (int block = 0; block < own[pass]; block++)
        fetch_block(to + block * BLOCK, &lines_map, barrier, column, group + block * 4);
      if (pass == PASSES - 1)
        fetch_shared(to + own[pass] * BLOCK + room.rank * (BLOCK / 2), &shared_map, barrier, column,
                     cluster * (BLOCKS * 4) + 24 + (int)room.rank * 2);
#else
      fetch_lines(to, &lines_map, barrier, column, (cluster % work.pairs * 2 + (int)room.rank) * (2 * HALF));
#endif
    };
    int early = 0;
    if (pass == 0) {
      // The matrix is no other launch's: its first columns are on their way while the one before ends.
      early = min(work.steps, STAGES);
      Ring ahead = ring;
      for (int step = 0; step < early; step++) {
        fetch_matrix(ahead, step);
        ahead.next();
      }
      asm volatile("griddepcontrol.wait;" ::: "memory");
    }
    for (int step = 0; step < work.steps; step++) {
      if (step >= early) fetch_matrix(ring, step);
      fetch_for_both(room.base + ring.at * STAGE + HELD * BLOCK + room.rank * (ROWS / 2), &rows_map, room.full + 8 * ring.at,
                     (first + step) * SPAN, room.rank * (COUNT / 2));
      ring.next();
    }
  }
}

// Sums of WHOLE blocks with all rows, and, where HALVED, of one with the half that is this multiprocessor's, from the stages'
// `block`-th on.
template <int WHOLE, bool HALVED>
struct Sums {
  float x[WHOLE ? WHOLE : 1][COUNT / 2];
  float y[COUNT / 4];

  __device__ __forceinline__ void make(Ring& ring, const Room& room, int block, int steps) {
    int last = 0;
    for (int step = 0; step < steps; step++) {
      wait(room.full + 8 * ring.at, ring.phase);
      u32 at = room.base + ring.at * STAGE;
      u64 a = described(at + block * BLOCK), b = described(at + HELD * BLOCK);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < SPAN / 16; i++) {
#pragma unroll
        for (int w = 0; w < WHOLE; w++) multiply(x[w], a + w * (BLOCK / 16) + 2 * i, b + 2 * i, (step | i) != 0);
        if constexpr (HALVED)
          multiply_half(y, a + WHOLE * (BLOCK / 16) + 2 * i, b + room.rank * (ROWS / 32) + 2 * i, (step | i) != 0);
      }
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (step > 0) {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (threadIdx.x % 128 < 2) arrive(room.free + 8 * last, threadIdx.x % 128);
      }
      last = ring.at;
      ring.next();
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    // Nothing that reads them may be moved before this.
#pragma unroll
    for (int w = 0; w < WHOLE; w++) {
#pragma unroll
      for (int i = 0; i < COUNT / 2; i++) asm volatile("" : "+f"(x[w][i])::"memory");
    }
    if constexpr (HALVED) {
#pragma unroll
      for (int i = 0; i < COUNT / 4; i++) asm volatile("" : "+f"(y[i])::"memory");
    }
    if (threadIdx.x % 128 < 2) arrive(room.free + 8 * last, threadIdx.x % 128);
  }
};

#if GATED
// Of this warp's eight pairs of lines and `8 EIGHTS` rows, a piece of 16 bytes for each row, to lines of 64 bytes that are
// swizzled.
template <int EIGHTS>
__device__ __forceinline__ void stage(u32 panel, int warp, int lane, const float (&x)[4 * EIGHTS]) {
  auto value = [&](int j) { return pair(gated(x[4 * j], x[4 * j + 2]), gated(x[4 * j + 1], x[4 * j + 3])); };
  auto line = [&](int of) { return panel + (lane % of) * 64 + ((warp ^ (lane / 2 % 4)) * 16); };
#pragma unroll
  for (int j = 0; j + 4 <= EIGHTS; j += 4)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(line(32) + j * 512),
                 "r"(value(j)), "r"(value(j + 1)), "r"(value(j + 2)), "r"(value(j + 3))
                 : "memory");
  if constexpr (EIGHTS % 4 >= 2) {
    constexpr int j = EIGHTS / 4 * 4;
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(line(16) + j * 512), "r"(value(j)),
                 "r"(value(j + 1))
                 : "memory");
  }
  if constexpr (EIGHTS % 2) {
    constexpr int j = EIGHTS - 1;
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(line(8) + j * 512), "r"(value(j))
                 : "memory");
  }
}

template <int WHOLE, bool HALVED>
__device__ __forceinline__ void gate(Ring& ring, const Room& room, const Map& out_map, int steps, int group, int pass) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, cluster = blockIdx.x / 2, before = group * HELD / 2;
  bool leads = threadIdx.x % 128 == 0;
  u32 panel = room.panels + before * PANEL;
  int column = cluster * (BLOCKS * GATES), own = column + ((int)room.rank * 3 + pass * 2 + before) * GATES;
  Sums<WHOLE, HALVED> sums;
  sums.make(ring, room, before, steps);
  // Until what was written before is read; and where stages are written to, until nobody multiplies from there.
  if (leads) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  meet();
#pragma unroll
  for (int w = 0; w < WHOLE; w++) stage<COUNT / 8>(panel + w * PANEL, warp, lane, sums.x[w]);
  if constexpr (HALVED) stage<COUNT / 16>(panel + WHOLE * PANEL, warp, lane, sums.y);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  meet();
  if (leads) {
#pragma unroll
    for (int w = 0; w < WHOLE; w++) {
      write(&out_map, panel + w * PANEL, own + w * GATES, 0);
      write(&out_map, panel + w * PANEL + PANEL / 2, own + w * GATES, COUNT / 2);
    }
    if constexpr (HALVED)
      write(&out_map, panel + WHOLE * PANEL, column + (BLOCKS - 1) * GATES, (int)room.rank * (COUNT / 2));
  }
}
#else
__device__ __forceinline__ void leave(Ring& ring, const Room& room, const Work& work, int group) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, cluster = blockIdx.x / 2;
  int line = ((cluster % work.pairs * 2 + (int)room.rank) * 2 + group) * HALF + warp * 16 + lane / 4, row = 2 * (lane % 4);
  Sums<1, false> sums;
  sums.make(ring, room, group, work.steps);
  if (line >= work.height) return;
  float* to = work.parts + ((long long)(cluster / work.pairs) * work.rows + row) * work.height + line;
#pragma unroll
  for (int j = 0; j < COUNT / 8; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (row + 8 * j + e < work.rows) {
        to[(long long)(8 * j + e) * work.height] = sums.x[0][4 * j + e];
        to[(long long)(8 * j + e) * work.height + 8] = sums.x[0][4 * j + e + 2];
      }
    }
  }
}
#endif

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
crossed(const __grid_constant__ Map lines_map, const __grid_constant__ Map shared_map, const __grid_constant__ Map rows_map,
        const __grid_constant__ Map out_map, const __grid_constant__ Work work) {
  extern __shared__ unsigned char memory[];
  Room room;
  room.base = (shared_at(memory) + 1023) & ~1023u;
  room.panels = APART ? room.base + STAGES * STAGE : room.base;
  room.full = room.base + STAGES * STAGE + APART;
  room.free = room.full + 8 * STAGES;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(room.rank));
  int group = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      init(room.full + 8 * i, 1);
      // Both groups of both blocks read what either fetches.
      init(room.free + 8 * i, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  meet_cluster();
  asm volatile("griddepcontrol.launch_dependents;");
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " IDLE ";");
    if (threadIdx.x % 128 == 0) provide(lines_map, shared_map, rows_map, work, room);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 " BUSY ";");
    Ring ring{0, 0};
#if GATED && PASSES == 1
    if (group == 0)
      gate<2, false>(ring, room, out_map, work.steps, 0, 0);
    else
      gate<1, true>(ring, room, out_map, work.steps, 1, 0);
#elif GATED
    gate<1, false>(ring, room, out_map, work.steps, group, 0);
    if (group == 0)
      gate<1, false>(ring, room, out_map, work.steps, 0, 1);
    else
      gate<0, true>(ring, room, out_map, work.steps, 1, 1);
#else
    leave(ring, room, work, group);
#endif
#if GATED
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
  }
  // Neither leaves while the other may still signal to it.
  meet_cluster();
}
