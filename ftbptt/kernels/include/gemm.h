// Single-thread GEMM for the K-step loops: c[rows, n] = a[rows, k] @ b[k, n], where b is packed once and then
// multiplied at every step. a and c are row-major and may be unaligned; packed must be 64-byte aligned. n > 0; rows and
// k may be 0. NaN and inf propagate as in a plain loop.
//
// Packed layout: b is cut into panels of at most `width(k, n)` vectors of columns (balanced, so the widths of one
// matrix differ by at most one vector; only the last vector is padded, with zeros), each stored row after row. The
// product goes panel by panel, and in a panel block by block of rows: a block keeps its [rows, panel] piece of c in
// registers over the whole of k, and reads b as one contiguous stream. k is not blocked: a panel is read again from L2
// for every block of rows, at 1/3 of what L2 can deliver, and that costs less than to store and reload c.
#pragma once
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace ftbptt {

// Hidden: a process loads many kernels, possibly built for different instruction sets, and must not share this code
// between them.
template <typename T>
struct __attribute__((visibility("hidden"))) Gemm {
  static constexpr int64_t packed_size(int64_t k, int64_t n) { return k * vectors(n) * kLanes; }

  static constexpr int64_t panels(int64_t k, int64_t n) { return (vectors(n) + width(k, n) - 1) / width(k, n); }

  // Packs b[i, j] = b[i * stride_k + j * stride_n]; panels first .. last - 1 only, so that threads can share the work.
  template <typename S>
  static void pack(const S* b, int64_t stride_k, int64_t stride_n, int64_t k, int64_t n, T* packed, int64_t first,
                   int64_t last) {
    const int64_t count = panels(k, n), base = vectors(n) / count, wider = vectors(n) % count;
    for (int64_t p = first; p < last; ++p) {
      const int64_t begin = (p * base + std::min(p, wider)) * kLanes, columns = (base + (p < wider)) * kLanes;
      const int64_t real = std::min(columns, n - begin);
      const S* in = b + begin * stride_n;
      T* out = packed + begin * k;
      // 16 rows at a time: the lines in use stay in L1 whichever of the two strides is 1
      for (int64_t first_row = 0; first_row < k; first_row += 16) {
        const int64_t last_row = std::min(k, first_row + 16);
        for (int64_t j = 0; j < columns; ++j)
          for (int64_t i = first_row; i < last_row; ++i)
            out[i * columns + j] = j < real ? static_cast<T>(in[i * stride_k + j * stride_n]) : T(0);
      }
    }
  }

  static void run(int64_t rows, int64_t k, int64_t n, const T* a, int64_t lda, const T* packed, T* c, int64_t ldc) {
    const int64_t count = panels(k, n), base = vectors(n) / count, wider = vectors(n) % count;
    Ahead ahead = kLines;
    if (bytes(k, n) <= kSmall) ahead = kNothing;
    if (bytes(k, n) >= kOutsideL2 && rows > max_rows(kPrefetchedWidth)) ahead = kNextPanel;
    const T* b = packed;
    for (int64_t p = 0; p < count; ++p) {
      const bool last = p + 1 == count;
      const int64_t size = base + (p < wider), tail = last ? n - (vectors(n) - 1) * kLanes : kLanes;
      const T* end = b + size * kLanes * k;
      panel(std::make_integer_sequence<int, kMaxWidth>(), size, rows, k, a, lda, b, last ? packed : end, ahead, c, ldc,
            tail);
      b = end;
      c += size * kLanes;
    }
  }

 private:
  using Vec = at::vec::Vectorized<T>;
  static constexpr int64_t kLanes = Vec::size();
  static constexpr int kRegisters = kLanes * sizeof(T) >= 64 ? 32 : 16;
  static constexpr int kPrefetchedWidth = 3, kMaxWidth = kRegisters >= 32 ? 4 : 3;
  // Sizes of a packed b in bytes. From kOutsideL2 on we assume that b is read from L3 at each step, since a cell has
  // several weights. If b does stay in L2, prefetching the next panel costs nothing measurable.
  static constexpr int64_t kSmall = 64 << 10, kOutsideL2 = 512 << 10;

  static constexpr int64_t vectors(int64_t n) { return (n + kLanes - 1) / kLanes; }
  static constexpr int64_t bytes(int64_t k, int64_t n) { return packed_size(k, n) * int64_t(sizeof(T)); }

  // 9 rows x 3 vectors read the fewest bytes per FMA, which matters most once b comes from L2 or beyond. A matrix that
  // stays in L1 is typically the weight of a small cell with few rows, where 4 vectors give more independent sums (with
  // 16 registers, 4 rows x 3 vectors are best for both).
  static constexpr int64_t width(int64_t k, int64_t n) {
    return bytes(k, n) <= kSmall ? kMaxWidth : kPrefetchedWidth;
  }

  // The sums, one row of the panel and one element of a must fit in the vector registers. More than 12 rows would run
  // out of address registers.
  static constexpr int max_rows(int panel_width) { return std::min((kRegisters - 1 - panel_width) / panel_width, 12); }

  // An FMA has a latency of 4 cycles and two start per cycle. Blocks of few rows therefore split the sum over k into
  // partial sums, to have at least 8, better 12 independent sums, as far as the registers allow.
  static constexpr int partial_sums(int sums, int panel_width) {
    int parts = 1;
    while (parts < 8 && sums * parts < 12 && sums * parts * 2 + panel_width + 1 <= kRegisters) parts *= 2;
    return parts;
  }

  // What a block prefetches at each row of the panel. kNothing: b is in L1. kLines: rows of the same panel a little
  // ahead, into L1. kNextPanel: also two cache lines of the next panel, into L2. The blocks of rows divide the next
  // panel between them, which hides the latency of L3 behind the arithmetic of all of them; a single block has too
  // little arithmetic for that.
  enum Ahead { kNothing, kLines, kNextPanel };

  using Block = void (*)(int64_t, const T*, int64_t, const T*, const T*, int64_t, T*, int64_t, int64_t);

  // Prefetching pays from 3 rows on: below, the loads of b take all the load slots.
  template <int W, Ahead A, int... R>
  static constexpr std::array<Block, sizeof...(R)> table(std::integer_sequence<int, R...>) {
    return {&block<R + 1, W, R + 1 >= 3 && W == kPrefetchedWidth ? A : kNothing>...};
  }

  template <int... W, typename... Args>
  static void panel(std::integer_sequence<int, W...>, int64_t size, Args... args) {
    ((size == W + 1 ? panel<W + 1>(args...) : void()), ...);
  }

  template <int W>
  static void panel(int64_t rows, int64_t k, const T* a, int64_t lda, const T* b, const T* next, Ahead ahead, T* c,
                    int64_t ldc, int64_t tail) {
    constexpr int kRows = max_rows(W);
    using Rows = std::make_integer_sequence<int, kRows>;
    static constexpr std::array<Block, kRows> blocks[] = {table<W, kNothing>(Rows()), table<W, kLines>(Rows()),
                                                          table<W, kNextPanel>(Rows())};
    // blocks of equal size (up to one row), so that no remainder of few rows runs at a fraction of the speed
    int left = (static_cast<int>(rows) + kRows - 1) / kRows;
    const int64_t next_stride = left > 0 ? (W * kLanes + left - 1) / left : 0;
    for (; left > 0; --left) {
      const int size = (static_cast<int>(rows) + left - 1) / left;
      blocks[ahead][size - 1](k, a, lda, b, next, next_stride, c, ldc, tail);
      next += next_stride * k;
      a += size * lda;
      c += size * ldc;
      rows -= size;
    }
  }

  // R rows x W vectors of c; the last vector has `tail` columns. The loops over R, W and U unroll completely, which
  // turns the arrays into registers. The last bits of an element depend on U, hence on the block that it falls in.
  template <int R, int W, Ahead A>
  static void block(int64_t k, const T* a, int64_t lda, const T* b, const T* next, int64_t next_stride, T* c,
                    int64_t ldc, int64_t tail) {
    constexpr int U = partial_sums(R * W, W);
    Vec sum[U][R][W];
    int64_t i = 0;
    for (; i + U <= k; i += U) {
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) {
        if constexpr (A == kNextPanel) {
          __builtin_prefetch(next, 0, 2);
          __builtin_prefetch(next + kLanes, 0, 2);
          next += next_stride;
        }
        add_row<R, W, A != kNothing>(a + i + u, lda, b + (i + u) * W * kLanes, sum[u]);
      }
    }
    if constexpr (U > 1) {
      for (; i < k; ++i) add_row<R, W, false>(a + i, lda, b + i * W * kLanes, sum[0]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) {
#pragma GCC unroll 8
        for (int u = 1; u < U; ++u) sum[0][r][w] = sum[0][r][w] + sum[u][r][w];
        sum[0][r][w].store(c + r * ldc + w * kLanes, w + 1 < W ? kLanes : tail);
      }
  }

  // sum[r, :] += a[r, i] * b[i, :] for one i
  template <int R, int W, bool Prefetch>
  static inline __attribute__((always_inline)) void add_row(const T* a, int64_t lda, const T* b, Vec (&sum)[R][W]) {
    constexpr int64_t kDistance = 2048 / sizeof(T);
    Vec row[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      row[w] = Vec::loadu(b + w * kLanes);
      if constexpr (Prefetch) __builtin_prefetch(b + w * kLanes + kDistance);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec element(a[r * lda]);
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) sum[r][w] = at::vec::fmadd(element, row[w], sum[r][w]);
    }
  }
};

}  // namespace ftbptt
