// Sizes of blocks, and the product of rows of x with a block of widened weights.
#pragma once
#include "simd.h"

enum { MOST_ROWS = 8, ROWS_OF_X = 6, BLOCK_K = 128 };
#if LANES == 8
enum { VECTORS = 2, SUMS = 10 };  // of 16 registers
#else
enum { VECTORS = 4, SUMS = 24 };  // of 32 registers
#endif
enum { BLOCK_O = VECTORS * LANES };
// Weight rows that are multiplied with M rows of x at a time; of more than four, memory gives less.
#define TOGETHER(M) (SUMS / (M) > 4 ? 4 : SUMS / (M) < 1 ? 1 : SUMS / (M))

// How far from a row of weights are those that are asked for while it is read, R rows at a time: what
// memory gives in the time that it takes to answer, and more.
enum { AHEAD = 8192 };
INLINE size_t bytes_ahead(size_t row_bytes, size_t R) {
  return (AHEAD / row_bytes > R ? AHEAD / row_bytes : R) * row_bytes;
}

// What tile number `tile` computes of y[M, O]: `tiles` of them share a part of the rows, which is
// small enough for a cache, and each has as many units of outputs as the others, give or take one.
enum { UNIT_OF_FEW = 8, UNIT_OF_MANY = 64, ROWS_TOGETHER = 192 };
typedef struct { size_t row, rows, from, to; } part;

INLINE size_t parts_of_rows(size_t M) { return (M + ROWS_TOGETHER - 1) / ROWS_TOGETHER; }

INLINE size_t start_of(size_t i, size_t count, size_t all, size_t unit) {
  const size_t start = (all + unit - 1) / unit * i / count * unit;
  return start < all ? start : all;
}

INLINE part part_of(size_t tile, size_t tiles, size_t M, size_t O) {
  const size_t unit = M > MOST_ROWS ? UNIT_OF_MANY : UNIT_OF_FEW, parts = parts_of_rows(M);
  const size_t i = tile / tiles, j = tile % tiles, row = start_of(i, parts, M, ROWS_OF_X);
  return (part){row, start_of(i + 1, parts, M, ROWS_OF_X) - row, start_of(j, tiles, O, unit),
                start_of(j + 1, tiles, O, unit)};
}

// y[m][BLOCK_O] (+)= x[m][count] wide[count][BLOCK_O] for M rows.
INLINE void multiply(const float *x, const float *wide, float *y, size_t K, size_t count,
                     size_t stride, int first, const int M) {
  vf acc[ROWS_OF_X][VECTORS];
  for (int m = 0; m < M; m++)
    for (int v = 0; v < VECTORS; v++)
      acc[m][v] = first ? zero() : load_f32(y + m * stride + v * LANES);
  for (size_t k = 0; k < count; k++) {
    vf of_w[VECTORS];
    for (int v = 0; v < VECTORS; v++) of_w[v] = load_f32(wide + k * BLOCK_O + v * LANES);
    for (int m = 0; m < M; m++) {
      const vf of_x = splat(x[m * K + k]);
      for (int v = 0; v < VECTORS; v++) acc[m][v] += of_x * of_w[v];
    }
  }
  for (int m = 0; m < M; m++)
    for (int v = 0; v < VECTORS; v++) store(y + m * stride + v * LANES, acc[m][v]);
}

// What is packed after this block of weights: some of it is asked for between any few rows, so that
// reading it takes no time of its own.
typedef struct {
  const char *from;
  size_t bytes, rows, length;  // so many rows of `length` bytes, `bytes` apart
} ahead;

static void multiply_reading(const float *x, const float *wide, float *y, size_t M, size_t K,
                             size_t count, size_t stride, int first, ahead next) {
  const size_t share = next.rows ? next.rows * ROWS_OF_X / M + 1 : 0;
  size_t m = 0;
  for (; m + ROWS_OF_X <= M; m += ROWS_OF_X) {
    for (size_t row = 0; row < share && next.rows; row++, next.rows--, next.from += next.bytes)
      for (size_t byte = 0; byte < next.length; byte += LINE) soon(next.from + byte);
    multiply(x + m * K, wide, y + m * stride, K, count, stride, first, ROWS_OF_X);
  }
  for (; m + 2 <= M; m += 2)
    multiply(x + m * K, wide, y + m * stride, K, count, stride, first, 2);
  if (m < M) multiply(x + m * K, wide, y + m * stride, K, count, stride, first, 1);
}

static void multiply_all(const float *x, const float *wide, float *y, size_t M, size_t K,
                         size_t count, size_t stride, int first) {
  multiply_reading(x, wide, y, M, K, count, stride, first, (ahead){0, 0, 0, 0});
}

// A block of outputs that ends inside a vector is computed into `edge` and copied.
enum { EDGE_ROWS = 48 };

INLINE void copy_edge(const float *edge, float *y, size_t rows, size_t outputs, size_t stride) {
  for (size_t m = 0; m < rows; m++)
    for (size_t o = 0; o < outputs; o++) y[m * stride + o] = edge[m * BLOCK_O + o];
}
