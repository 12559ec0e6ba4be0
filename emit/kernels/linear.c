// y = x w^T: x f32[M, K] and weights [O, K] of any stored type, in float32 arithmetic.
//
// A tile is a range of outputs of a part of the rows. Few rows (M <= MOST_ROWS, a decode): each
// weight is read once, from memory, and multiplied with every row, lanes along K. Many (a prefill): a
// block of weights is widened and transposed into the stack, lanes along O, and multiplied with every
// row of the part.
#include "product.h"

// acc[r][m] = sum of w[r] x[m] over all of K, for R weight rows and M rows of x. What is
// read soon after these rows is asked for.
#define FEW(NAME, TYPE)                                                                            \
  INLINE void few_##NAME(const float *x, const TYPE *w, float *y, size_t K, size_t O, const int R, \
                         const int M) {                                                            \
    vf acc[8][MOST_ROWS];                                                                          \
    for (int r = 0; r < R; r++)                                                                    \
      for (int m = 0; m < M; m++) acc[r][m] = zero();                                              \
    const size_t whole = K / LANES * LANES;                                                        \
    const size_t next = bytes_ahead(K * sizeof(TYPE), R) / sizeof(TYPE);                           \
    for (size_t k = 0; k < whole; k += LANES) {                                                    \
      vf wide[8];                                                                                  \
      for (int r = 0; r < R; r++) {                                                                \
        soon(w + r * K + k + next);                                                                \
        wide[r] = load_##NAME(w + r * K + k);                                                      \
      }                                                                                            \
      for (int m = 0; m < M; m++) {                                                                \
        const vf of_x = load_f32(x + m * K + k);                                                   \
        for (int r = 0; r < R; r++) acc[r][m] += wide[r] * of_x;                                   \
      }                                                                                            \
    }                                                                                              \
    for (int r = 0; r < R; r++)                                                                    \
      for (int m = 0; m < M; m++) {                                                                \
        float total = sum(acc[r][m]);                                                              \
        for (size_t k = whole; k < K; k++) total += one_##NAME(w + r * K + k) * x[m * K + k];      \
        y[m * O + r] = total;                                                                      \
      }                                                                                            \
  }                                                                                                \
  INLINE void tile_few_##NAME(const float *x, const TYPE *w, float *y, size_t K, size_t O,         \
                              size_t from, size_t to, const int R, const int M) {                  \
    size_t o = from;                                                                               \
    for (; o + R <= to; o += R) few_##NAME(x, w + o * K, y + o, K, O, R, M);                       \
    for (; o < to; o++) few_##NAME(x, w + o * K, y + o, K, O, 1, M);                               \
  }

// Number j of those in each word of four bytes.
INLINE vf of_word_f32(vf word, int j) { return (void)j, word; }
INLINE vf of_word_bf16(vf word, int j) { return (vf)(j ? (vu)word & 0xffff0000u : (vu)word << 16); }
INLINE vf of_word_f16(vf word, int j) {
  typedef uint16_t halves __attribute__((ext_vector_type(LANES)));
  const halves bits = __builtin_convertvector(j ? (vu)word >> 16 : (vu)word & 0xffff, halves);
  return __builtin_convertvector((vh)bits, vf);
}

// wide[k][o] = w[o][k], a block of `count` inputs of BLOCK_O outputs; zeros beyond the last output.
// Whole vectors of words have a loop of known length, which stays in registers.
#define PACK(NAME, TYPE)                                                                           \
  INLINE void pack_##NAME(const TYPE *w, float *wide, size_t K, size_t count, size_t outputs) {    \
    enum { PER = 4 / sizeof(TYPE), STEP = LANES * PER };                                           \
    for (size_t o = 0; o < BLOCK_O; o += LANES, w += LANES * K) {                                  \
      const size_t rows = outputs > o ? outputs - o : 0, whole = count / PER * PER;                \
      for (size_t k = 0; k < whole; k += STEP) {                                                   \
        const size_t words = whole - k < STEP ? (whole - k) / PER : (size_t)LANES;                 \
        vf transposed[LANES];                                                                      \
        float *out = wide + k * BLOCK_O + o;                                                       \
        transposed_words(w + k, K * sizeof(TYPE), words, rows, transposed);                        \
        if (words == LANES)                                                                        \
          for (size_t i = 0; i < STEP; i++)                                                        \
            store(out + i * BLOCK_O, of_word_##NAME(transposed[i / PER], i % PER));                \
        else                                                                                       \
          for (size_t i = 0; i < words * PER; i++)                                                 \
            store(out + i * BLOCK_O, of_word_##NAME(transposed[i / PER], i % PER));                \
      }                                                                                            \
      for (size_t k = whole; k < count; k++)                                                       \
        for (size_t i = 0; i < LANES; i++)                                                         \
          wide[k * BLOCK_O + o + i] = i < rows ? one_##NAME(w + i * K + k) : 0;                    \
    }                                                                                              \
  }

#define MANY(NAME, TYPE)                                                                           \
  static void tile_many_##NAME(const float *x, const TYPE *w, float *y, size_t M, size_t K,        \
                               size_t O, size_t from, size_t to) {                                 \
    float wide[BLOCK_K * BLOCK_O] __attribute__((aligned(64)));                                    \
    for (size_t o = from; o < to; o += BLOCK_O) {                                                  \
      const size_t outputs = to - o < BLOCK_O ? to - o : BLOCK_O;                                  \
      float edge[EDGE_ROWS * BLOCK_O] __attribute__((aligned(64)));                                \
      const size_t step = outputs < BLOCK_O ? EDGE_ROWS : M;                                       \
      for (size_t m = 0; m < M; m += step) {                                                       \
        const size_t rows = M - m < step ? M - m : step;                                           \
        float *out = outputs < BLOCK_O ? edge : y + m * O + o;                                     \
        const size_t stride = outputs < BLOCK_O ? (size_t)BLOCK_O : O;                             \
        for (size_t k = 0; k < K; k += BLOCK_K) {                                                  \
          const size_t count = K - k < BLOCK_K ? K - k : BLOCK_K;                                  \
          const size_t far = k + BLOCK_K < K ? k + BLOCK_K : BLOCK_O * K;                          \
          const ahead next = {(const char *)(w + o * K + far), K * sizeof(TYPE), BLOCK_O,          \
                              BLOCK_K * sizeof(TYPE)};                                             \
          pack_##NAME(w + o * K + k, wide, K, count, outputs);                                     \
          multiply_reading(x + m * K + k, wide, out, rows, K, count, stride, k == 0, next);        \
        }                                                                                          \
        if (outputs < BLOCK_O) copy_edge(edge, y + m * O + o, rows, outputs, O);                   \
      }                                                                                            \
    }                                                                                              \
  }

// Outputs `from` to `to` of M rows.
#define ROWS(NAME, TYPE)                                                                           \
  static void rows_##NAME(const float *x, const TYPE *w, float *y, size_t M, size_t K, size_t O,   \
                          size_t from, size_t to) {                                                \
    switch (M) {                                                                                   \
      case 1: return tile_few_##NAME(x, w, y, K, O, from, to, TOGETHER(1), 1);                     \
      case 2: return tile_few_##NAME(x, w, y, K, O, from, to, TOGETHER(2), 2);                     \
      case 3: return tile_few_##NAME(x, w, y, K, O, from, to, TOGETHER(3), 3);                     \
      case 4: return tile_few_##NAME(x, w, y, K, O, from, to, TOGETHER(4), 4);                     \
      case 5: return tile_few_##NAME(x, w, y, K, O, from, to, TOGETHER(5), 5);                     \
      case 6: return tile_few_##NAME(x, w, y, K, O, from, to, TOGETHER(6), 6);                     \
      case 7: return tile_few_##NAME(x, w, y, K, O, from, to, TOGETHER(7), 7);                     \
      case 8: return tile_few_##NAME(x, w, y, K, O, from, to, TOGETHER(8), 8);                     \
      default: return tile_many_##NAME(x, w, y, M, K, O, from, to);                                \
    }                                                                                              \
  }

// Tile number `tile`, of `tiles` for each part of the rows.
//
// scanwright_experts_<type> does so for N products: y[n] = x[n / share] w[index[n]]^T, where x and y
// are N / share and N times M rows, w [E, O, K] and index i32[N].
#define LINEAR(NAME, TYPE)                                                                         \
  FEW(NAME, TYPE)                                                                                  \
  PACK(NAME, TYPE)                                                                                 \
  MANY(NAME, TYPE)                                                                                 \
  ROWS(NAME, TYPE)                                                                                 \
  EXPORT scanwright_linear_##NAME(const float *x, const TYPE *w, float *y, size_t M, size_t K,     \
                                  size_t O, size_t tiles, size_t tile) {                           \
    const part of = part_of(tile, tiles, M, O);                                                    \
    rows_##NAME(x + of.row * K, w, y + of.row * O, of.rows, K, O, of.from, of.to);                 \
  }                                                                                                \
  EXPORT scanwright_experts_##NAME(const float *x, const TYPE *w, const int32_t *index, float *y,  \
                                   size_t M, size_t K, size_t O, size_t tiles, size_t share,       \
                                   size_t tile) {                                                  \
    const size_t each = tiles * parts_of_rows(M), n = tile / each;                                 \
    scanwright_linear_##NAME(x + n / share * M * K, w + (size_t)index[n] * O * K, y + n * M * O,   \
                             M, K, O, tiles, tile % each);                                         \
  }

LINEAR(f32, float)
LINEAR(bf16, uint16_t)
LINEAR(f16, _Float16)
