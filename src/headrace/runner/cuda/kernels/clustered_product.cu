// Products of many rows with a matrix, and what comes after them in the same launch: the gate of pairs of lines (GATED), norm
// and rotation of heads, which go to queries, to the step's rows and to their cells (TURNED), or the sum with what `out` holds
// (neither). bf16 in and out, compute capability 9.0.
//
// Two multiprocessors are a cluster. Each has 128 rows of its own, and fetches one half of the WIDE lines that both need
// for both: without that the second-level cache would be the limit. In each, one warp fetches and two groups of four multiply,
// 64 rows each; clusters stay and take tile after tile, so that the first lines of the next are there when one is written.
//
// Defined by who compiles it: WIDE, STAGES, GROUP, GATED, TURNED, for the second NORMED and PAGE, and `multiply`.

constexpr int TALL = 128, SPAN = 64, HALF = 64, DIM = 128;
// Bytes.
constexpr u32 ROWS = TALL * SPAN * 2, LINES = WIDE * SPAN * 2, STAGE = ROWS + LINES, PANEL = HALF * SPAN * 2;
// Columns that a tile writes.
constexpr int WRITTEN = GATED ? WIDE / 2 : WIDE;
// Registers of a thread that multiplies, and of one that fetches: three groups of four warps have 65,536.
#define BUSY "232"
#define IDLE "40"

struct Turn {
  const int* positions;
  const long long* cells;
  const float* cosines;
  const float* sines;
  const u16* q_norm;
  const u16* k_norm;
  u16* keys;
  u16* values;
  float eps;
  int heads;
  int kv_heads;
};

// The second-level cache adds.
__device__ __forceinline__ void add(const Map* map, u32 from, int column, int line) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(from), "r"(column), "r"(line)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__device__ __forceinline__ void meet(int group) {
  __syncwarp();
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// Which tile is the `entry`-th: GROUP pairs of row tiles, all lines of them, then the next, so that what runs at once shares
// rows and lines.
__device__ __forceinline__ void place(int entry, int pairs, int tiles, int& pair, int& tile) {
  int first = entry / (GROUP * tiles) * GROUP, size = min(pairs - first, GROUP), at = entry % (GROUP * tiles);
  pair = first + at % size;
  tile = at / size;
}

// A quarter of 64 x 64 sums, as tensor cores leave them, to a panel in shared memory whose lines of 128 bytes are swizzled.
template <class Value>
__device__ __forceinline__ void stage(u32 panel, int warp, int lane, Value value) {
  int line = warp * 16 + lane % 16;
#pragma unroll
  for (int part = 0; part < 4; part++) {
    u32 at = panel + line * 128 + (((part * 2 + lane / 16) ^ (line & 7)) * 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(value(8 * part)),
                 "r"(value(8 * part + 2)), "r"(value(8 * part + 4)), "r"(value(8 * part + 6))
                 : "memory");
  }
}

// Until the next panel may be filled again. By turns it is the one written before the last; where a tile fills a single one,
// it is always the same. Then, filled by all, until it may be written.
__device__ __forceinline__ void await_panel(int group, bool leads) {
  if (leads) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(WRITTEN / SPAN % 2 ? 0 : 1) : "memory");
  meet(group);
}

__device__ __forceinline__ void finish_panel(int group) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  meet(group);
}

#if TURNED
// Of the two rows of a thread, 8 apart, and the columns of a head's first half that it has: 8 j and the next one.
struct Angles {
  float2 cosines[2][DIM / 16];
  float2 sines[2][DIM / 16];
};

__device__ __forceinline__ void read(Angles& angles, const Turn& turns, const int (&positions)[2], int lane) {
#pragma unroll
  for (int which = 0; which < 2; which++) {
    long long at = (long long)positions[which] * (DIM / 2) + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < DIM / 16; j++) {
      angles.cosines[which][j] = __ldg((const float2*)(turns.cosines + at + 8 * j));
      angles.sines[which][j] = __ldg((const float2*)(turns.sines + at + 8 * j));
    }
  }
}

// A head's norm and rotation: its sums are `x[4 j + e]`, of column 8 j + 2 (lane % 4) + e % 2 of row e / 2.
__device__ __forceinline__ void turn(float* x, const Turn& turns, const Angles& angles, bool is_query, int lane) {
#if NORMED
  const u16* norm = (is_query ? turns.q_norm : turns.k_norm) + 2 * (lane % 4);
  float factors[2];
#pragma unroll
  for (int which = 0; which < 2; which++) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < DIM / 8; j++) {
      float low = x[4 * j + 2 * which], high = x[4 * j + 2 * which + 1];
      squares += low * low + high * high;
    }
    squares += __shfl_xor_sync(0xFFFFFFFF, squares, 1);
    squares += __shfl_xor_sync(0xFFFFFFFF, squares, 2);
    factors[which] = rsqrtf(squares / DIM + turns.eps);
  }
#endif
#pragma unroll
  for (int j = 0; j < DIM / 16; j++) {
#if NORMED
    u32 low_norms = __ldg((const u32*)(norm + 8 * j)), high_norms = __ldg((const u32*)(norm + 8 * j + DIM / 2));
#endif
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float low = x[4 * j + e], high = x[4 * (j + DIM / 16) + e];
#if NORMED
      low *= factors[e / 2] * number(low_norms >> (16 * (e % 2)));
      high *= factors[e / 2] * number(high_norms >> (16 * (e % 2)));
#endif
      float2 c = angles.cosines[e / 2][j], s = angles.sines[e / 2][j];
      float cosine = e % 2 ? c.y : c.x, sine = e % 2 ? s.y : s.x;
      x[4 * j + e] = low * cosine - high * sine;
      x[4 * (j + DIM / 16) + e] = high * cosine + low * sine;
    }
  }
}

// A panel's lines to their cells.
__device__ __forceinline__ void keep(u32 panel, u16* head, const long long (&places)[4], int half) {
#pragma unroll
  for (int part = 0; part < 4; part++) {
    int line = threadIdx.x % 128 / 8 + 16 * part, piece = threadIdx.x % 8;
    if (places[part] >= 0) {
      uint4 value;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                   : "r"(panel + line * 128 + ((piece ^ (line & 7)) * 16)));
      *(uint4*)(head + places[part] + half * SPAN + piece * 8) = value;
    }
  }
}
#endif

__device__ __forceinline__ void provide(const Map& rows_map, const Map& lines_map, u32 base, u32 full, u32 free, u32 rank,
                                        int pairs, int tiles, int height, int steps) {
  int at = 0;
  u32 phase = 1;
  bool is_first = true;
  for (int entry = blockIdx.x / 2; entry < pairs * tiles; entry += gridDim.x / 2) {
    int pair, tile;
    place(entry, pairs, tiles, pair, tile);
    int row = (pair * 2 + rank) * TALL;
    int line = GATED ? tile * (WIDE / 2) + (int)rank * height : tile * WIDE + (int)rank * (WIDE / 2);
    int early = 0;
    if (is_first) {
      // Lines are no other launch's: the first are on their way while the one before ends.
      early = min(steps, STAGES);
      for (int step = 0; step < early; step++) {
        expect(full + 8 * step, STAGE);
        fetch_for_both(base + step * STAGE + ROWS + rank * (LINES / 2), &lines_map, full + 8 * step, step * SPAN, line);
      }
      asm volatile("griddepcontrol.wait;" ::: "memory");
      is_first = false;
    }
    for (int step = 0; step < steps; step++) {
      u32 to = base + at * STAGE, barrier = full + 8 * at;
      if (step >= early) {
        wait(free + 8 * at, phase);
        expect(barrier, STAGE);
        fetch_for_both(to + ROWS + rank * (LINES / 2), &lines_map, barrier, step * SPAN, line);
      }
      fetch(to, &rows_map, barrier, step * SPAN, row);
      if (++at == STAGES) {
        at = 0;
        phase ^= 1;
      }
    }
  }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
clustered(const __grid_constant__ Map rows_map, const __grid_constant__ Map lines_map, const __grid_constant__ Map out_map,
          const __grid_constant__ Map queries_map, const __grid_constant__ Turn turns, u16* out, int rows, int pairs, int tiles,
          int height, int steps) {
  extern __shared__ unsigned char memory[];
  u32 base = (shared_at(memory) + 1023) & ~1023u, panels = base + STAGES * STAGE;
  u32 full = panels + 4 * PANEL, free = full + 8 * STAGES;
  int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  bool leads = threadIdx.x % 128 == 0;
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      init(full + 8 * i, 1);
      // Both groups of both blocks read what either fetches.
      init(free + 8 * i, 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  meet_cluster();
  asm volatile("griddepcontrol.launch_dependents;");
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 " IDLE ";");
    if (warp == 0 && lane == 0) provide(rows_map, lines_map, base, full, free, rank, pairs, tiles, height, steps);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 " BUSY ";");
    float x[WIDE / 2];
    int at = 0, last = 0;
    u32 phase = 0, mine = panels + group * 2 * PANEL;
    for (int entry = blockIdx.x / 2; entry < pairs * tiles; entry += gridDim.x / 2) {
      int pair_at, tile;
      place(entry, pairs, tiles, pair_at, tile);
      int row = (pair_at * 2 + rank) * TALL + group * HALF;
#if TURNED
      int positions[2], first_head = tile * (WIDE / DIM);
      long long places[4];
#pragma unroll
      for (int which = 0; which < 2; which++) {
        int line = row + warp * 16 + lane / 4 + 8 * which;
        positions[which] = line < rows ? turns.positions[line] : 0;
      }
#pragma unroll
      for (int part = 0; part < 4; part++) {
        int line = row + threadIdx.x % 128 / 8 + 16 * part;
        long long cell = line < rows ? turns.cells[line] : -1;
        places[part] = cell < 0 ? -1 : (cell / PAGE * turns.kv_heads * PAGE + cell % PAGE) * DIM;
      }
#endif
      for (int step = 0; step < steps; step++) {
        wait(full + 8 * at, phase);
        u64 a = described(base + at * STAGE + group * (ROWS / 2)), b = described(base + at * STAGE + ROWS);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < SPAN / 16; i++) multiply(x, a + 2 * i, b + 2 * i, (step | i) != 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (step > 0) {
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (threadIdx.x % 128 < 2) arrive(free + 8 * last, threadIdx.x % 128);
        }
        last = at;
        if (++at == STAGES) {
          at = 0;
          phase ^= 1;
        }
      }
#if TURNED
      Angles angles;
      if (first_head < turns.heads + turns.kv_heads) read(angles, turns, positions, lane);
#endif
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      // Nothing that reads them may be moved before this.
#pragma unroll
      for (int i = 0; i < WIDE / 2; i++) asm volatile("" : "+f"(x[i])::"memory");
      if (threadIdx.x % 128 < 2) arrive(free + 8 * last, threadIdx.x % 128);
#if TURNED
#pragma unroll
      for (int which = 0; which < WIDE / DIM; which++) {
        int head = first_head + which, kept = head - turns.heads;
        bool is_query = kept < 0, is_key = !is_query && kept < turns.kv_heads;
        float* sums = x + which * (DIM / 2);
        if (is_query || is_key) turn(sums, turns, angles, is_query, lane);
        u16* cells = is_key ? turns.keys + kept * (PAGE * DIM) : turns.values + (kept - turns.kv_heads) * (PAGE * DIM);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 panel = mine + half * PANEL;
          await_panel(group, leads);
          stage(panel, warp, lane, [&](int i) {
            const float* v = sums + half * (DIM / 4) + i;
            return pair(v[0], v[1]);
          });
          finish_panel(group);
          if (leads) write(is_query ? &queries_map : &out_map, panel, head * DIM + half * SPAN, row);
          if (!is_query) keep(panel, cells, places, half);
        }
      }
#else
#pragma unroll
      for (int panel = 0; panel * SPAN < WRITTEN; panel++) {
        auto value = [&](int i) {
          const float* v = x + panel * (SPAN / 2) + i;
#if GATED
          return pair(gated(v[0], v[WIDE / 4]), gated(v[1], v[WIDE / 4 + 1]));
#else
          return pair(v[0], v[1]);
#endif
        };
        int column = tile * WRITTEN + panel * SPAN;
        if ((panel + 1) * SPAN <= WRITTEN) {
          await_panel(group, leads);
          stage(mine + panel % 2 * PANEL, warp, lane, value);
          finish_panel(group);
          if (leads) (GATED ? write : add)(&out_map, mine + panel % 2 * PANEL, column, row);
        } else {
          // Half a panel, or less: of gates alone.
          int line = row + warp * 16 + lane / 4;
#pragma unroll
          for (int j = 0; j < WRITTEN % SPAN / 8; j++) {
            int c = column + 8 * j + 2 * (lane % 4);
            if (c < height) {
              if (line < rows) *(u32*)(out + (long long)line * height + c) = value(4 * j);
              if (line + 8 < rows) *(u32*)(out + (long long)(line + 8) * height + c) = value(4 * j + 2);
            }
          }
        }
      }
#endif
    }
    if (leads) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  // Neither leaves while the other may still signal to it.
  meet_cluster();
}
